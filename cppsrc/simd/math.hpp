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

/// e^x: 2^n times a Taylor polynomial on |r| <= ln(2) / 2 (remainder 5e-9). 0 below the normal numbers, infinity from kHighest.
[[maybe_unused]] inline F32 exp(F32 x) {
    constexpr float kLowest = -87.33f;
    constexpr float kHighest = 88.72f;
    const F32 clamped = min(splat(kHighest), max(splat(kLowest), x));
    const I32 n = round_to_int(mul(clamped, splat(1.44269504f)));
    const F32 whole = from_int(n);
    const F32 r = fma(whole, splat(-1.42860677e-6f), fma(whole, splat(-0.693145752f), clamped));  // ln 2 in two parts, the first one exact times n
    F32 sum = splat(1.0f / 5040.0f);
    sum = fma(sum, r, splat(1.0f / 720.0f));
    sum = fma(sum, r, splat(1.0f / 120.0f));
    sum = fma(sum, r, splat(1.0f / 24.0f));
    sum = fma(sum, r, splat(1.0f / 6.0f));
    sum = fma(sum, r, splat(0.5f));
    sum = fma(sum, r, splat(1.0f));
    sum = fma(sum, r, splat(1.0f));
    const F32 result = floats(add(bits(sum), shift_left<23>(n)));
    const F32 low = select_less(x, splat(kLowest), splat(0.0f), result);
    return select_less(x, splat(kHighest), low, add(x, floats(splat(std::int32_t{0x7f800000}))));  // infinity, or the NaN that x is
}

/// 1 / (1 + e^-x).
[[maybe_unused]] inline F32 sigmoid(F32 x) { return div(splat(1.0f), add(splat(1.0f), exp(negate(x)))); }

/// Near zero, where 2 s(2x) - 1 would cancel, an odd Taylor polynomial (remainder 4e-9 relative at 1/4).
[[maybe_unused]] inline F32 tanh(F32 x) {
    const F32 square = mul(x, x);
    F32 sum = splat(-1382.0f / 155925.0f);
    sum = fma(sum, square, splat(62.0f / 2835.0f));
    sum = fma(sum, square, splat(-17.0f / 315.0f));
    sum = fma(sum, square, splat(2.0f / 15.0f));
    sum = fma(sum, square, splat(-1.0f / 3.0f));
    const F32 near = fma(mul(sum, square), x, x);
    const F32 far = sub(mul(splat(2.0f), sigmoid(add(x, x))), splat(1.0f));
    return select_less(abs(x), splat(0.25f), near, far);
}

}  // namespace
}  // namespace fusible::simd::FUSIBLE_LEVEL
