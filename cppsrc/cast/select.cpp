#include "cast/kernels.hpp"
#include "runtime/level.hpp"

namespace fusible {

const CastKernels& cast_kernels() {
#if defined(FUSIBLE_X86_KERNELS)
    switch (current_level()) {
        case Level::Avx512Bf16:  // its bf16 dot products have no use in a cast
        case Level::Avx512:
            return avx512::cast_kernels;
        case Level::Avx2:
            return avx2::cast_kernels;
        case Level::Generic:
            break;
    }
#endif
    return generic::cast_kernels;
}

}  // namespace fusible
