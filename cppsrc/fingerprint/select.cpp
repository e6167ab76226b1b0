#include "fingerprint/kernels.hpp"
#include "runtime/select.hpp"

namespace fusible::fingerprint {

const Kernels& kernels() { return FUSIBLE_SELECT(kernels); }

}  // namespace fusible::fingerprint
