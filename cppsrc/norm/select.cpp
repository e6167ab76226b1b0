#include "norm/kernels.hpp"
#include "runtime/select.hpp"

namespace fusible::norm {

const Kernels& kernels() { return FUSIBLE_SELECT(kernels); }

}  // namespace fusible::norm
