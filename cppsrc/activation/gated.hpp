// The gated activations of a pair (a, b): value f(a, b), and gradient, which writes g df/da and g df/db.
#pragma once

#include "activation/kernels.hpp"
#include "activation/pointwise.hpp"

namespace fusible::activation::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// A(a) b.
template <class A>
struct Gate {
    explicit Gate(const GateParameters&) {}

    F32 value(F32 a, F32 b) const { return mul(A::value(a), b); }

    void gradient(F32 g, F32 a, F32 b, F32& da, F32& db) const {
        da = A::gradient(mul(g, b), a);
        db = mul(A::value(a), g);
    }
};

/// beta1 tanh(a / beta1) s(a) * beta2 tanh(b / beta2).
struct SituGlu {
    explicit SituGlu(const GateParameters& p)
        : beta1(splat(p.beta1)), beta2(splat(p.beta2)), inverse1(splat(1.0f / p.beta1)), inverse2(splat(1.0f / p.beta2)) {}

    F32 value(F32 a, F32 b) const {
        const F32 gate = mul(mul(beta1, tanh(mul(a, inverse1))), sigmoid(a));
        return mul(gate, mul(beta2, tanh(mul(b, inverse2))));
    }

    void gradient(F32 g, F32 a, F32 b, F32& da, F32& db) const {
        const F32 one = splat(1.0f);
        const F32 t = tanh(mul(a, inverse1));
        const F32 u = tanh(mul(b, inverse2));
        const F32 s = sigmoid(a);
        const F32 gate = mul(mul(beta1, t), s);
        const F32 gate_slope = fma(gate, sub(one, s), mul(sub(one, mul(t, t)), s));
        da = mul(mul(g, gate_slope), mul(beta2, u));
        db = mul(mul(g, sub(one, mul(u, u))), gate);
    }

    F32 beta1, beta2, inverse1, inverse2;
};

/// c s(alpha c) (clamp(b, -limit, limit) + offset) with c = min(a, limit).
struct ClampedSwiglu {
    explicit ClampedSwiglu(const GateParameters& p) : limit(splat(p.limit)), alpha(splat(p.alpha)), offset(splat(p.offset)) {}

    F32 up(F32 b) const { return add(min(limit, max(negate(limit), b)), offset); }

    F32 value(F32 a, F32 b) const { return mul(Swish::value(min(limit, a), alpha), up(b)); }

    void gradient(F32 g, F32 a, F32 b, F32& da, F32& db) const {
        const F32 zero = splat(0.0f);
        const F32 c = min(limit, a);
        // Where a number or NaN is clamped, nothing comes back, as of torch's clamp.
        da = select_at_most(a, limit, mul(mul(g, up(b)), Swish::slope(c, alpha)), zero);
        db = select_at_most(abs(b), limit, mul(g, Swish::value(c, alpha)), zero);
    }

    F32 limit, alpha, offset;
};

}  // namespace
}  // namespace fusible::activation::FUSIBLE_LEVEL
