// The fingerprint of a run of bytes: sixty-four words side by side, each a hash of every sixty-fourth word of the run.
#pragma once

#include "fingerprint/kernels.hpp"
#include "simd/simd.hpp"

namespace fusible::fingerprint::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr int kWords = 64;
constexpr int kVectors = kWords / kLanes;
constexpr std::size_t kBlock = kWords * sizeof(std::uint32_t);

/// h = rotate(h ^ word) * odd: one to one in the word, so that a run in which a single word differs has another hash for certain. The rotation brings
/// what happens in the highest bits, such as a change of sign, to where the product spreads it; without it two changes of sign would cancel out.
inline void take_block(I32 (&state)[kVectors], const unsigned char* block) {
    const I32 factor = splat(static_cast<std::int32_t>(0x9E3779B1u));
    for (int v = 0; v < kVectors; ++v) {
        const I32 h = exclusive_or(state[v], load_words(block + v * kLanes * 4));
        state[v] = mul_low(either(shift_left<15>(h), shift_right<17>(h)), factor);
    }
}

inline Fingerprint fingerprint(const void* untyped, std::size_t count) {
    const auto* bytes = static_cast<const unsigned char*>(untyped);
    std::uint32_t words[kWords];
    for (int i = 0; i < kWords; ++i) words[i] = (static_cast<std::uint32_t>(i) + 1) * 0x85EBCA77u;
    I32 state[kVectors];
    for (int v = 0; v < kVectors; ++v) state[v] = load_words(words + v * kLanes);
    std::size_t begin = 0;
    for (; begin + kBlock <= count; begin += kBlock) take_block(state, bytes + begin);
    if (begin < count) {
        unsigned char rest[kBlock] = {};
        __builtin_memcpy(rest, bytes + begin, count - begin);
        take_block(state, rest);
    }
    for (int v = 0; v < kVectors; ++v) store_words(words + v * kLanes, state[v]);
    Fingerprint result = {count, count};
    for (int i = 0; i < kWords; i += 2) {
        const std::uint64_t pair = words[i] | static_cast<std::uint64_t>(words[i + 1]) << 32;
        take(result, pair, pair);
    }
    return result;
}

}  // namespace
}  // namespace fusible::fingerprint::FUSIBLE_LEVEL
