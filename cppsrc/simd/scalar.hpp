// One-element conversions, shared by the levels: tails, exceptional values, and the whole of the generic level.
#pragma once

#include <cstdint>
#include <cstring>

namespace fusible::simd::FUSIBLE_LEVEL {
namespace {

struct bf16 {
    std::uint16_t bits;
};

struct f16 {
    std::uint16_t bits;
};

template <class S>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16> = true;

[[maybe_unused]] inline std::int32_t bits_of(float value) {
    std::int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

[[maybe_unused]] inline float float_of(std::int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

[[maybe_unused]] inline float to_float(float value) { return value; }

[[maybe_unused]] inline float to_float(bf16 value) {
    return float_of(static_cast<std::int32_t>(static_cast<std::uint32_t>(value.bits) << 16));
}

/// Exact: half's fields moved into float's, rebiased by a multiplication that also normalises subnormals.
[[maybe_unused]] inline float to_float(f16 value) {
    const std::uint32_t magnitude = static_cast<std::uint32_t>(value.bits & 0x7fffu) << 13;
    std::uint32_t bits = static_cast<std::uint32_t>(bits_of(float_of(static_cast<std::int32_t>(magnitude)) * 0x1p112f));
    if (magnitude >= 0x0f800000u) bits = 0x7f800000u | (magnitude & 0x007fffffu);
    return float_of(static_cast<std::int32_t>(bits | (static_cast<std::uint32_t>(value.bits & 0x8000u) << 16)));
}

[[maybe_unused]] inline void from_float(float value, float& out) { out = value; }

/// Round to nearest even; a NaN stays one, with its sign.
[[maybe_unused]] inline void from_float(float value, bf16& out) {
    const auto bits = static_cast<std::uint32_t>(bits_of(value));
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        out.bits = static_cast<std::uint16_t>((bits >> 16) | 0x40u);
    else
        out.bits = static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// Round to nearest even, overflow to infinity; a NaN stays one, with its sign.
[[maybe_unused]] inline void from_float(float value, f16& out) {
    const auto bits = static_cast<std::uint32_t>(bits_of(value));
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    std::uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) {
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {
        const float aligned = float_of(static_cast<std::int32_t>(magnitude)) + 0.5f;  // ulp(0.5) is half's smallest step
        half = static_cast<std::uint32_t>(bits_of(aligned)) - 0x3f000000u;
    } else {
        half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    out.bits = static_cast<std::uint16_t>(sign | half);
}

}  // namespace
}  // namespace fusible::simd::FUSIBLE_LEVEL
