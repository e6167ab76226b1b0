// The pointwise activations: value f(x), and gradient g f'(x) of an incoming gradient g. Each passes a NaN on.
#pragma once

#include "activation/erf_gelu.hpp"
#include "activation/gelu.hpp"
#include "simd/math.hpp"

namespace fusible::activation::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

struct Sigmoid {
    static F32 value(F32 x) { return sigmoid(x); }

    static F32 gradient(F32 g, F32 x) {
        const F32 s = sigmoid(x);
        return mul(g, mul(s, sub(splat(1.0f), s)));
    }
};

/// x s(kx), and its derivative s + k x s (1 - s).
struct Swish {
    static F32 value(F32 x, F32 k) { return mul(x, sigmoid(mul(k, x))); }

    static F32 slope(F32 x, F32 k) {
        const F32 s = sigmoid(mul(k, x));
        return fma(k, mul(mul(x, s), sub(splat(1.0f), s)), s);
    }
};

struct Silu {
    static F32 value(F32 x) { return mul(x, sigmoid(x)); }
    static F32 gradient(F32 g, F32 x) { return mul(g, Swish::slope(x, splat(1.0f))); }
};

struct QGelu {
    static constexpr float kScale = 1.702f;

    static F32 value(F32 x) { return Swish::value(x, splat(kScale)); }
    static F32 gradient(F32 g, F32 x) { return mul(g, Swish::slope(x, splat(kScale))); }
};

struct Relu {
    static F32 value(F32 x) { return max(splat(0.0f), x); }

    /// No product: an infinite gradient stays out where x <= 0. Where x is NaN, g passes, as in torch: a comparison with NaN is false.
    static F32 gradient(F32 g, F32 x) { return select_at_most(x, splat(0.0f), splat(0.0f), g); }
};

/// max(x, 0)^2.
struct SRelu {
    static F32 value(F32 x) {
        const F32 positive = max(splat(0.0f), x);
        return mul(positive, positive);
    }

    static F32 gradient(F32 g, F32 x) {
        const F32 positive = max(splat(0.0f), x);
        return mul(g, add(positive, positive));
    }
};

}  // namespace
}  // namespace fusible::activation::FUSIBLE_LEVEL
