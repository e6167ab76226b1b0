#include "cast/kernels.hpp"
#include "runtime/select.hpp"

namespace fusible::cast {

const Kernels& kernels() { return FUSIBLE_SELECT(kernels); }

}  // namespace fusible::cast
