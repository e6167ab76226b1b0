// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "norm/kernels.hpp"

#include "norm/backward.hpp"

namespace fusible::norm::FUSIBLE_LEVEL {

extern const Kernels kernels;

#define FUSIBLE_BY_SOURCE(kernel, norm) {kernel<norm, float>, kernel<norm, f16>, kernel<norm, bf16>}
#define FUSIBLE_BY_GRADIENT(norm, x) {backward<norm, x, float>, backward<norm, x, f16>, backward<norm, x, bf16>}
#define FUSIBLE_BY_BOTH(norm) {FUSIBLE_BY_GRADIENT(norm, float), FUSIBLE_BY_GRADIENT(norm, f16), FUSIBLE_BY_GRADIENT(norm, bf16)}

const Kernels kernels = {
    {FUSIBLE_BY_SOURCE(forward, LayerNorm), FUSIBLE_BY_SOURCE(forward, RmsNorm)},
    {FUSIBLE_BY_SOURCE(forward_transposed, LayerNorm), FUSIBLE_BY_SOURCE(forward_transposed, RmsNorm)},
    {FUSIBLE_BY_BOTH(LayerNorm), FUSIBLE_BY_BOTH(RmsNorm)},
    widen,
    emit_run,
};

#undef FUSIBLE_BY_SOURCE
#undef FUSIBLE_BY_GRADIENT
#undef FUSIBLE_BY_BOTH

}  // namespace fusible::norm::FUSIBLE_LEVEL
