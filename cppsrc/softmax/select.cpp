#include "runtime/select.hpp"
#include "softmax/kernels.hpp"

namespace fusible::softmax {

const Kernels& kernels() { return FUSIBLE_SELECT(kernels); }

}  // namespace fusible::softmax
