// Casts over a run of consecutive elements.
#pragma once

#include <cstddef>

#include "cast/formats.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr std::int32_t kInfinityBits = 0x7f800000;
constexpr int kStep = 4 * kLanes;
constexpr std::size_t kBlock = 1024;

/// Scales that `encode` does not take: zero and infinity make NaN out of an infinity or a zero, and a sign would be lost.
[[maybe_unused]] inline bool is_plain(float scale) { return bits_of(scale) > 0 && bits_of(scale) < kInfinityBits; }

template <class S>
inline std::int32_t magnitude_of(S value) {
    return bits_of(to_float(value)) & 0x7fffffff;
}

template <class S, class F>
std::int32_t quantize_slowly(const S* source, std::uint8_t* codes, std::size_t count, float scale) {
    std::int32_t amax = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const float x = to_float(source[i]);
        const std::int32_t magnitude = magnitude_of(source[i]);
        amax = magnitude > amax ? magnitude : amax;
        codes[i] = encode_one<F>(magnitude > kInfinityBits ? x : x * scale);  // the sign of NaN * NaN depends on the order of operands
    }
    return amax;
}

template <class S, class F>
[[gnu::flatten]] inline I32 quantize_steps(const S* source, std::uint8_t* codes, std::size_t count, F32 scale) {
    const F32 scales[4] = {scale, scale, scale, scale};
    I32 amax[4] = {splat(0), splat(0), splat(0), splat(0)};
    for (std::size_t i = 0; i < count; i += kStep) {
        F32 x[4];
        for (int v = 0; v < 4; ++v) x[v] = load(source + i + static_cast<std::size_t>(v * kLanes));
        store_bytes(codes + i, encode<F>(x, scales, amax));
    }
    return max(max(amax[0], amax[1]), max(amax[2], amax[3]));
}

/// Blocks are quantized as if nothing were NaN; the amax tells whether one was, and such a block is done again element by element.
template <class S, class F>
std::int32_t quantize(const void* untyped, std::uint8_t* codes, std::size_t count, float scale) {
    const S* source = static_cast<const S*>(untyped);
    if (!is_plain(scale)) return quantize_slowly<S, F>(source, codes, count, scale);
    std::int32_t amax = 0;
    for (std::size_t begin = 0; begin < count; begin += kBlock) {
        const std::size_t length = count - begin < kBlock ? count - begin : kBlock;
        const std::size_t whole = length - length % kStep;
        std::int32_t found = max_lane(quantize_steps<S, F>(source + begin, codes + begin, whole, splat(scale)));
        if (found > kInfinityBits) quantize_slowly<S, F>(source + begin, codes + begin, whole, scale);
        const std::int32_t tail = quantize_slowly<S, F>(source + begin + whole, codes + begin + whole, length - whole, scale);
        found = tail > found ? tail : found;
        amax = found > amax ? found : amax;
    }
    return amax;
}

template <class S>
std::int32_t amax_of(const void* untyped, std::size_t count) {
    const S* source = static_cast<const S*>(untyped);
    I32 lanes[4] = {splat(0), splat(0), splat(0), splat(0)};
    const std::size_t whole = count - count % kStep;
    for (std::size_t i = 0; i < whole; i += kStep)
        for (int v = 0; v < 4; ++v) lanes[v] = max(lanes[v], magnitude_of(load(source + i + static_cast<std::size_t>(v * kLanes))));
    std::int32_t amax = max_lane(max(max(lanes[0], lanes[1]), max(lanes[2], lanes[3])));
    for (std::size_t i = whole; i < count; ++i) {
        const std::int32_t magnitude = magnitude_of(source[i]);
        amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
}

/// out = value(code) * scale_inv, in float32, rounded once to the output type.
template <class F, class S>
void dequantize(const std::uint8_t* codes, void* untyped, std::size_t count, float scale_inv) {
    S* out = static_cast<S*>(untyped);
    const F32 factor = splat(scale_inv);
    const std::size_t whole = count - count % kLanes;
    for (std::size_t i = 0; i < whole; i += kLanes) store(out + i, mul(decode<F>(load_bytes(codes + i)), factor));
    if (whole == count) return;
    std::uint8_t padded[kLanes] = {};
    S values[kLanes];
    std::memcpy(padded, codes + whole, count - whole);
    store(values, mul(decode<F>(load_bytes(padded)), factor));
    std::memcpy(static_cast<void*>(out + whole), values, (count - whole) * sizeof(S));
}

}  // namespace
}  // namespace fusible::cast::FUSIBLE_LEVEL
