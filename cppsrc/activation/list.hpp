// Every activation, once: the order of their names and of the tables of kernels. A new one is a line here and its struct.
#pragma once

/// The elementwise ones: entry(name, name of the gated one, struct). The struct has value(x) and gradient(g, x) (pointwise.hpp); the gated activation
/// is that of the first half times the second half.
#define FUSIBLE_POINTWISE_ACTIVATIONS(entry) \
    entry(gelu, geglu, Gelu)                 \
    entry(erf_gelu, erf_geglu, ErfGelu)      \
    entry(qgelu, qgeglu, QGelu)              \
    entry(relu, reglu, Relu)                 \
    entry(sigmoid, glu, Sigmoid)             \
    entry(silu, swiglu, Silu)                \
    entry(srelu, sreglu, SRelu)

/// The gated ones with formulae of their own: entry(name, struct). The struct is made of GateParameters, with value(a, b) and gradient (gated.hpp).
#define FUSIBLE_GATED_ACTIVATIONS(entry) \
    entry(situglu, SituGlu)              \
    entry(clamped_swiglu, ClampedSwiglu)
