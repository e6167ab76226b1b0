#include "rope/kernels.hpp"
#include "runtime/select.hpp"

namespace fusible::rope {

const Kernels& kernels() { return FUSIBLE_SELECT(kernels); }

}  // namespace fusible::rope
