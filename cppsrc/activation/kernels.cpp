// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "activation/kernels.hpp"

#include "activation/blocks.hpp"

namespace fusible::activation::FUSIBLE_LEVEL {

extern const Kernels kernels;

#define FUSIBLE_VALUE(name, gated, A) value<A>,
#define FUSIBLE_GRADIENT(name, gated, A) gradient<A>,
#define FUSIBLE_GATE_VALUE(name, gated, A) gated_value<Gate<A>>,
#define FUSIBLE_GATE_GRADIENT(name, gated, A) gated_gradient<Gate<A>>,
#define FUSIBLE_GATED_VALUE(name, A) gated_value<A>,
#define FUSIBLE_GATED_GRADIENT(name, A) gated_gradient<A>,

const Kernels kernels = {
    {FUSIBLE_POINTWISE_ACTIVATIONS(FUSIBLE_VALUE)},
    {FUSIBLE_POINTWISE_ACTIVATIONS(FUSIBLE_GRADIENT)},
    {FUSIBLE_POINTWISE_ACTIVATIONS(FUSIBLE_GATE_VALUE) FUSIBLE_GATED_ACTIVATIONS(FUSIBLE_GATED_VALUE)},
    {FUSIBLE_POINTWISE_ACTIVATIONS(FUSIBLE_GATE_GRADIENT) FUSIBLE_GATED_ACTIVATIONS(FUSIBLE_GATED_GRADIENT)},
    run,
    tile,
};

#undef FUSIBLE_VALUE
#undef FUSIBLE_GRADIENT
#undef FUSIBLE_GATE_VALUE
#undef FUSIBLE_GATE_GRADIENT
#undef FUSIBLE_GATED_VALUE
#undef FUSIBLE_GATED_GRADIENT

}  // namespace fusible::activation::FUSIBLE_LEVEL
