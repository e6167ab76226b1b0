// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "codes/kernels.hpp"

#include "codes/multiply.hpp"

namespace fusible::codes::FUSIBLE_LEVEL {

extern const Kernels kernels;

// In the order of `Coding`.
#define FUSIBLE_CODINGS(of)                                                                                                             \
    {                                                                                                                                   \
        of<Decoder8<E4M3>, NoFactors>, of<Decoder8<E5M2>, NoFactors>, of<Decoder8<E4M3>, Exponents>, of<Decoder8<E5M2>, Exponents>,     \
            of<Decoder8<E4M3>, Floats>, of<Decoder8<E5M2>, Floats>, of<Decoder4, SmallFloats>                                           \
    }

const Kernels kernels = {FUSIBLE_CODINGS(multiply), FUSIBLE_CODINGS(reorder)};

}  // namespace fusible::codes::FUSIBLE_LEVEL
