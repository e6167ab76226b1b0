#include "fingerprint/kernels.hpp"
#include "runtime/select.hpp"

namespace fusible {

const FingerprintKernels& fingerprint_kernels() { return FUSIBLE_SELECT(fingerprint_kernels); }

}  // namespace fusible
