// Elementary functions on vectors, to a few units in the last place of float; and the loads and stores of a row's end.
#pragma once

#include <cstddef>

#include "simd/simd.hpp"

namespace fusible::simd::FUSIBLE_LEVEL {
namespace {

/// The first `count` < kLanes elements, zeros in the other lanes.
template <class S>
inline F32 load_first(const S* source, std::size_t count) {
    S padded[kLanes] = {};
    std::memcpy(static_cast<void*>(padded), source, count * sizeof(S));
    return load(padded);
}

template <class S>
inline void store_first(S* out, F32 value, std::size_t count) {
    S padded[kLanes];
    store(padded, value);
    std::memcpy(static_cast<void*>(out), padded, count * sizeof(S));
}

[[maybe_unused]] inline F32 abs(F32 a) { return floats(both(bits(a), splat(std::int32_t{0x7fffffff}))); }

[[maybe_unused]] inline F32 negate(F32 a) { return sub(splat(-0.0f), a); }

/// e^r of |r| <= ln(2) / 2 by a Taylor polynomial (remainder 5e-9).
inline F32 exp_near_zero(F32 r) {
    F32 sum = splat(1.0f / 5040.0f);
    sum = fma(sum, r, splat(1.0f / 720.0f));
    sum = fma(sum, r, splat(1.0f / 120.0f));
    sum = fma(sum, r, splat(1.0f / 24.0f));
    sum = fma(sum, r, splat(1.0f / 6.0f));
    sum = fma(sum, r, splat(0.5f));
    sum = fma(sum, r, splat(1.0f));
    return fma(sum, r, splat(1.0f));
}

/// x - n ln 2, which is in two parts, the first one exact times n.
inline F32 without_powers(F32 x, F32 n) { return fma(n, splat(-1.42860677e-6f), fma(n, splat(-0.693145752f), x)); }

constexpr float kLog2E = 1.44269504f;
constexpr float kLowestExp = -87.33f;
constexpr float kHighestExp = 88.72f;

/// e^x: 2^n e^r. 0 below the normal numbers, infinity from kHighestExp on, or from where float ends.
[[maybe_unused]] inline F32 exp(F32 x) {
#if defined(FUSIBLE_SIMD_AVX512)
    const F32 bounded = min(splat(128.0f), x);  // the NaN that x is, and no infinity, of which nothing can be taken
    const F32 n{_mm512_roundscale_ps(mul(bounded, splat(kLog2E)).v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    const __mmask16 normal = _mm512_cmp_ps_mask(x.v, splat(kLowestExp).v, _CMP_NLT_UQ);
    return {_mm512_maskz_scalef_ps(normal, exp_near_zero(without_powers(bounded, n)).v, n.v)};
#else
    const F32 clamped = min(splat(kHighestExp), max(splat(kLowestExp), x));
    const I32 n = round_to_int(mul(clamped, splat(kLog2E)));
    const F32 result = floats(add(bits(exp_near_zero(without_powers(clamped, from_int(n)))), shift_left<23>(n)));
    const F32 low = select_less(x, splat(kLowestExp), splat(0.0f), result);
    return select_less(x, splat(kHighestExp), low, add(x, floats(splat(std::int32_t{0x7f800000}))));  // infinity, or the NaN that x is
#endif
}

constexpr float kLowestExp2 = -126.0f;

/// 2^x of x >= kLowestExp2, infinity from 128 on; of lower x at most 2^-126. 2^n times a polynomial on |r| <= 1/2 that is closest in relative error
/// (1e-7) and 1 at 0.
inline F32 exp2_of_normal(F32 x) {
#if defined(FUSIBLE_SIMD_AVX512)
    const F32 r{_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};  // 0 of an infinity
    const F32 n = sub(x, r);
#else
    const F32 bounded = min(splat(128.0f), max(splat(kLowestExp2), x));
    const I32 n = round_to_int(bounded);
    const F32 r = sub(bounded, from_int(n));
#endif
    F32 sum = splat(0.0013264715f);
    sum = fma(sum, r, splat(0.009671514f));
    sum = fma(sum, r, splat(0.05550734f));
    sum = fma(sum, r, splat(0.24022242f));
    sum = fma(sum, r, splat(0.693147f));
    sum = fma(sum, r, splat(1.0f));
#if defined(FUSIBLE_SIMD_AVX512)
    return {_mm512_scalef_ps(sum.v, n.v)};
#else
    return floats(add(bits(sum), shift_left<23>(n)));
#endif
}

/// 2^x, 0 below the normal numbers.
[[maybe_unused]] inline F32 exp2(F32 x) { return select_less(x, splat(kLowestExp2), splat(0.0f), exp2_of_normal(x)); }

/// 1 / (1 + e^-x), of -x log2(e), whose rounding is an error of x eps of the exponential.
inline F32 sigmoid_of_power(F32 power) { return div(splat(1.0f), add(splat(1.0f), exp2_of_normal(power))); }

/// 1 / (1 + e^-x).
[[maybe_unused]] inline F32 sigmoid(F32 x) { return sigmoid_of_power(mul(splat(-kLog2E), x)); }

/// 2 s(2x) - 1 with an s of few ulps, of which it leaves all errors; near zero, where it would cancel, an odd Taylor polynomial (remainder 4e-9
/// relative at 1/4).
[[maybe_unused]] inline F32 tanh(F32 x) {
    const F32 square = mul(x, x);
    F32 sum = splat(-1382.0f / 155925.0f);
    sum = fma(sum, square, splat(62.0f / 2835.0f));
    sum = fma(sum, square, splat(-17.0f / 315.0f));
    sum = fma(sum, square, splat(2.0f / 15.0f));
    sum = fma(sum, square, splat(-1.0f / 3.0f));
    const F32 near = fma(mul(sum, square), x, x);
    const F32 far = sub(div(splat(2.0f), add(splat(1.0f), exp(mul(splat(-2.0f), x)))), splat(1.0f));
    return select_less(abs(x), splat(0.25f), near, far);
}

}  // namespace
}  // namespace fusible::simd::FUSIBLE_LEVEL
