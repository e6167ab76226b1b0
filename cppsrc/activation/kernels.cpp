// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "activation/kernels.hpp"

#include "activation/blocks.hpp"

namespace fusible::activation::FUSIBLE_LEVEL {

extern const Kernels kernels;

const Kernels kernels = {
    {value<Gelu>, value<QGelu>, value<Relu>, value<Sigmoid>, value<Silu>, value<SRelu>},
    {gradient<Gelu>, gradient<QGelu>, gradient<Relu>, gradient<Sigmoid>, gradient<Silu>, gradient<SRelu>},
    {gated_value<Gate<Gelu>>, gated_value<Gate<QGelu>>, gated_value<Gate<Relu>>, gated_value<Gate<Sigmoid>>, gated_value<Gate<Silu>>,
     gated_value<Gate<SRelu>>, gated_value<SituGlu>, gated_value<ClampedSwiglu>},
    {gated_gradient<Gate<Gelu>>, gated_gradient<Gate<QGelu>>, gated_gradient<Gate<Relu>>, gated_gradient<Gate<Sigmoid>>,
     gated_gradient<Gate<Silu>>, gated_gradient<Gate<SRelu>>, gated_gradient<SituGlu>, gated_gradient<ClampedSwiglu>},
    run,
    tile,
};

}  // namespace fusible::activation::FUSIBLE_LEVEL
