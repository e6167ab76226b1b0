// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "fingerprint/kernels.hpp"

#include "fingerprint/words.hpp"

namespace fusible::fingerprint::FUSIBLE_LEVEL {

extern const Kernels kernels;

const Kernels kernels = {fingerprint};

}  // namespace fusible::fingerprint::FUSIBLE_LEVEL
