// GELU in its tanh form, which is x s(2u) with u = sqrt(2/pi) (x + 0.044715 x^3): the logistic function keeps small results exact.
#pragma once

#include "simd/math.hpp"

namespace fusible::activation::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

struct Gelu {
    static constexpr float kTwice = 1.59576912f;  // 2 sqrt(2/pi)
    static constexpr float kCubic = 0.044715f;

    /// Bounded where s is 0 or 1 anyway, so that the slope of a large x is no product of 0 and infinity.
    static F32 square_of(F32 x) { return min(splat(256.0f), mul(x, x)); }

    static F32 gate(F32 x, F32 square) { return sigmoid_of_power(mul(x, fma(splat(-kTwice * kLog2E * kCubic), square, splat(-kTwice * kLog2E)))); }

    static F32 value(F32 x) { return mul(x, gate(x, mul(x, x))); }

    /// The derivative: s + x s (1 - s) 2u'.
    static F32 slope(F32 x) {
        const F32 square = square_of(x);
        const F32 s = gate(x, square);
        const F32 inner = mul(splat(kTwice), fma(splat(3.0f * kCubic), square, splat(1.0f)));
        return fma(mul(mul(x, s), sub(splat(1.0f), s)), inner, s);
    }

    static F32 gradient(F32 g, F32 x) { return mul(g, slope(x)); }
};

}  // namespace
}  // namespace fusible::activation::FUSIBLE_LEVEL
