#include "runtime/select.hpp"
#include "softmax/kernels.hpp"

namespace fusible {

const SoftmaxKernels& softmax_kernels() { return FUSIBLE_SELECT(softmax_kernels); }

}  // namespace fusible
