// E8M0: a power of two as its biased exponent (OCP Microscaling Formats specification 1.0, 2023), and the factors that follow from it.
#pragma once

#include "cast/runs.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr std::int32_t kNanExponent = 0xff;
constexpr std::int32_t kLastExponent = 0xfe;
constexpr std::int32_t kHalfBits = 0x400000;  // 2^-127, a subnormal float
constexpr std::int32_t kQuietNan = 0x7fc00000;

/// The byte of the least power of two that is not below a float >= 0, given as bits; not of NaN. The last one for infinity.
[[maybe_unused]] inline I32 exponent_above(I32 bits) {
    const I32 code = min(shift_right<23>(add(bits, splat(0x7fffff))), splat(kLastExponent));
    return add(code, add(where_above(bits, kHalfBits, 1), where_above(bits, 0, -1)));  // what lies in (0, 2^-127] has carried once
}

/// 2^(127 - code), by which values are multiplied before they are cast.
[[maybe_unused]] inline F32 factor_before(I32 code) {
    const I32 turned = add(exclusive_or(code, splat(0xff)), splat(-1));  // 254 - code
    return floats(either(shift_left<23>(turned), where_above(code, kLastExponent - 1, kHalfBits)));
}

/// 2^(code - 127).
[[maybe_unused]] inline float power_of(std::int32_t code) {
    if (code == kNanExponent) return float_of(kQuietNan);
    return float_of(code == 0 ? kHalfBits : code << 23);
}

[[maybe_unused]] inline F32 power_of(I32 code) {
    const I32 at_the_ends = either(exclusive_or(where_above(code, 0, kHalfBits), splat(kHalfBits)), where_above(code, kLastExponent, kHalfBits));
    return floats(either(shift_left<23>(code), at_the_ends));
}

}  // namespace
}  // namespace fusible::cast::FUSIBLE_LEVEL
