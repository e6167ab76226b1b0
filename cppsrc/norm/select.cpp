#include "norm/kernels.hpp"
#include "runtime/select.hpp"

namespace fusible {

const NormKernels& norm_kernels() { return FUSIBLE_SELECT(norm_kernels); }

}  // namespace fusible
