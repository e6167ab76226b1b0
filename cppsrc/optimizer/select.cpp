#include "optimizer/kernels.hpp"
#include "runtime/select.hpp"

namespace fusible {

const OptimizerKernels& optimizer_kernels() { return FUSIBLE_SELECT(optimizer_kernels); }

}  // namespace fusible
