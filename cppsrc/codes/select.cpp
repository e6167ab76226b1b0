#include "codes/kernels.hpp"
#include "runtime/select.hpp"

namespace fusible::codes {

const Kernels& kernels() {
#if defined(FUSIBLE_X86_KERNELS)
    if (current_level() == Level::Amx) return amx::kernels;
    if (current_level() == Level::Avx512Bf16) return avx512bf16::kernels;
#endif
    return FUSIBLE_SELECT(kernels);
}

}  // namespace fusible::codes
