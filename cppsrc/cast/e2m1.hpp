// E2M1, and the values of its codes.
#pragma once

#include "cast/formats.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Three bits and a sign, which `encode` and `decode` have in bit 7 as those of eight bits; it has neither infinities nor NaN.
struct E2M1 {
    static constexpr int kMantissa = 1;
    static constexpr int kBias = 1;
    static constexpr std::int32_t kMaxBits = 0x40c00000;  // 6
    static constexpr std::int32_t kNanCode = 0x07;
    static constexpr std::int32_t kLastFinite = 0x07;
    static constexpr std::int32_t kBeyondBits = 0;
};

/// The values of codes in the lowest four bits.
inline F32 decode_nibbles(I32 nibbles) {
    return decode<E2M1>(either(both(nibbles, splat(std::int32_t{7})), shift_left<4>(both(nibbles, splat(std::int32_t{8})))));
}

}  // namespace
}  // namespace fusible::cast::FUSIBLE_LEVEL
