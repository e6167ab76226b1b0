#include "cast/kernels.hpp"
#include "runtime/select.hpp"

namespace fusible {

const CastKernels& cast_kernels() { return FUSIBLE_SELECT(cast_kernels); }

}  // namespace fusible
