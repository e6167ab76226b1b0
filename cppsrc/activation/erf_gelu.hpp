// GELU in its exact form, x Phi(x) with Phi the normal distribution function, of which e^(-u^2 / 2) G(u) = Phi(-u) for u >= 0, where G is smooth:
// nothing cancels, so small results of negative x keep their digits, as they do not in x / 2 (1 + erf(x / sqrt(2))).
#pragma once

#include "simd/math.hpp"

namespace fusible::activation::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

struct ErfGelu {
    /// Beyond it e^(-u^2 / 2) is 0. u is bounded by it, so that for an infinite x nothing is a product of 0 and infinity.
    static constexpr float kFar = 16.0f;

    static F32 bounded(F32 x) { return min(splat(kFar), abs(x)); }

    /// e^(-u^2 / 2) for u <= kFar, 0 below the normal numbers: 2^n times a polynomial in r = u^2 + 2 n ln 2, |r| < 0.8, by least squares of the
    /// relative error (5e-9). u^2 comes in two parts, the first one exact, since a rounding of it would be multiplied by up to 87.
    static F32 bell(F32 u) {
        const F32 high = floats(both(bits(u), splat(std::int32_t{-4096})));
        const F32 square = mul(high, high);
        const F32 rest = mul(add(u, high), sub(u, high));
        const I32 n = round_to_int(mul(square, splat(-0.721347520f)));
        const F32 whole = from_int(n);
        const F32 r = add(fma(whole, splat(6.389237e-5f), fma(whole, splat(1.38623047f), square)), rest);  // 2 ln 2 in two parts, the first exact times n
        F32 sum = splat(2.16062231e-05f);
        sum = fma(sum, r, splat(-0.00026210908f));
        sum = fma(sum, r, splat(0.00260431536f));
        sum = fma(sum, r, splat(-0.0208328174f));
        sum = fma(sum, r, splat(0.124999966f));
        sum = fma(sum, r, splat(-0.500000037f));
        sum = fma(sum, r, splat(1.0f));
        return select_less(square, splat(174.6f), floats(add(bits(sum), shift_left<23>(n))), splat(0.0f));
    }

    /// Phi(-u), of the bell of u: G(u) = t P(w) with t = 1 / (1 + bent), w = bent t and bent = 0.35 u; P by least squares of the relative error for
    /// u <= 13.3 (2e-8).
    static F32 tail(F32 u, F32 bell) {
        const F32 bent = mul(splat(0.35f), u);
        const F32 t = div(splat(1.0f), add(splat(1.0f), bent));
        const F32 w = mul(bent, t);
        F32 sum = splat(-0.00443180563f);
        sum = fma(sum, w, splat(-0.012670279f));
        sum = fma(sum, w, splat(0.0636294864f));
        sum = fma(sum, w, splat(-0.0425529303f));
        sum = fma(sum, w, splat(-0.0266407243f));
        sum = fma(sum, w, splat(-0.0611143551f));
        sum = fma(sum, w, splat(0.102139488f));
        sum = fma(sum, w, splat(0.261086437f));
        sum = fma(sum, w, splat(-0.639833322f));
        sum = fma(sum, w, splat(0.5f));
        return mul(bell, mul(t, sum));
    }

    /// x Phi(x) = max(x, 0) - u Phi(-u), of either sign.
    static F32 value(F32 x) {
        const F32 u = bounded(x);
        return fma(negate(u), tail(u, bell(u)), max(splat(0.0f), x));
    }

    /// Phi(x) + x e^(-x^2 / 2) / sqrt(2 pi): for negative x the difference below, for positive ones 1 less that.
    static F32 slope(F32 x) {
        const F32 u = bounded(x);
        const F32 density = bell(u);
        const F32 below = fma(mul(splat(-0.398942280f), u), density, tail(u, density));
        return select_less(x, splat(0.0f), below, sub(splat(1.0f), below));
    }

    static F32 gradient(F32 g, F32 x) { return mul(g, slope(x)); }
};

}  // namespace
}  // namespace fusible::activation::FUSIBLE_LEVEL
