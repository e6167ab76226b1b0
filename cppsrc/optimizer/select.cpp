#include "optimizer/kernels.hpp"
#include "runtime/select.hpp"

namespace fusible::optimizer {

const Kernels& kernels() { return FUSIBLE_SELECT(kernels); }

}  // namespace fusible::optimizer
