#include "rope/kernels.hpp"
#include "runtime/select.hpp"

namespace fusible {

const RopeKernels& rope_kernels() { return FUSIBLE_SELECT(rope_kernels); }

}  // namespace fusible
