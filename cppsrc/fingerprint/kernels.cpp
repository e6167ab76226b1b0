// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "fingerprint/kernels.hpp"

#include "fingerprint/words.hpp"

namespace fusible {
namespace FUSIBLE_LEVEL {

extern const FingerprintKernels fingerprint_kernels;

const FingerprintKernels fingerprint_kernels = {fingerprint};

}  // namespace FUSIBLE_LEVEL
}  // namespace fusible
