// The factors of blocks along a column of weights, as floats, a section of the contracted dimension at a time.
#pragma once

#include "cast/exponents.hpp"
#include "cast/kernels.hpp"
#include "codes/kernels.hpp"

namespace fusible::codes::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;
using namespace cast::FUSIBLE_LEVEL;

/// Elements whose factors are worked out together.
constexpr int kSection = 1024;

/// One factor for all: the epilogue's.
struct NoFactors {
    static constexpr int kBlock = 0;
    static constexpr int kRoom = 1;
};

/// The factors that `count` bytes stand for by kRead, in whole vectors: after them what zeros stand for. Returns the largest of `largest` and the bytes,
/// lane by lane.
template <F32 (*kRead)(I32)>
inline I32 read_factors(const std::uint8_t* bytes, int count, float* out, I32 largest) {
    for (int i = 0; i < count; i += kLanes) {
        std::uint8_t padded[kLanes] = {};
        const std::uint8_t* from = bytes + i;
        if (count - i < kLanes) {
            std::memcpy(padded, from, static_cast<std::size_t>(count - i));
            from = padded;
        }
        const I32 codes = load_bytes(from);
        largest = max(largest, codes);
        store(out + i, kRead(codes));
    }
    return largest;
}

/// Where factors of a column are bytes: the one of the block that an element begins.
inline const std::uint8_t* bytes_at(const FewRows& few, std::int64_t col, std::int64_t block) {
    return static_cast<const std::uint8_t*>(few.scales) + col * few.scale_line_step + block;
}

// Each kind of factors has: kBlock elements; kRoom for those of a section, and for a vector after the last; and read, which writes those of `width`
// columns for the `count` elements from `first` on.

/// MXFP8 and MXFP4: powers of two.
struct Exponents {
    static constexpr int kBlock = cast::kMxBlock;
    static constexpr int kRoom = kSection / kBlock + kLanes;

    static void read(const FewRows& few, std::int64_t col, int width, std::int64_t first, int count, float (*out)[kRoom]) {
        for (int c = 0; c < width; ++c) read_factors<power_of>(bytes_at(few, col + c, first / kBlock), count / kBlock, out[c], splat(0));
    }
};

/// The values of E4M3 that are neither negative nor NaN: `decode` without the rest.
inline F32 decode_sizes(I32 codes) {
    const F32 normal = floats(add(shift_left<23 - E4M3::kMantissa>(codes), splat(std::int32_t{(127 - E4M3::kBias) << 23})));
    return min(normal, sub(add(normal, normal), floats(splat(Rounding<E4M3>::kMinNormalBits))));
}

/// NVFP4: E4M3, as which quantizing gives neither signs nor, but for a NaN among the elements, NaN.
struct SmallFloats {
    static constexpr int kBlock = cast::kFp4Block;
    static constexpr int kRoom = kSection / kBlock + kLanes;

    static void read(const FewRows& few, std::int64_t col, int width, std::int64_t first, int count, float (*out)[kRoom]) {
        I32 largest = splat(0);
        for (int c = 0; c < width; ++c)
            largest = read_factors<decode_sizes>(bytes_at(few, col + c, first / kBlock), count / kBlock, out[c], largest);
        if (max_lane(largest) < E4M3::kNanCode) return;
        for (int c = 0; c < width; ++c) read_factors<decode<E4M3>>(bytes_at(few, col + c, first / kBlock), count / kBlock, out[c], largest);
    }
};

/// FP8 in blocks of 128: floats.
struct Floats {
    static constexpr int kBlock = cast::kScaledBlock;
    static constexpr int kRoom = kSection / kBlock + kLanes;

    static void read(const FewRows& few, std::int64_t col, int width, std::int64_t first, int count, float (*out)[kRoom]) {
        for (int c = 0; c < width; ++c) {
            const float* from = static_cast<const float*>(few.scales) + (col + c) * few.scale_line_step + first / kBlock * few.scale_block_step;
            for (int i = 0; i * kBlock < count; ++i) out[c][i] = from[i * few.scale_block_step];
        }
    }
};

/// Lane by lane, the one of the floats at `source` that its index says; of these, as many as there are lanes may be read.
inline F32 lanes_at(const float* source, I32 indices) {
#if defined(FUSIBLE_SIMD_AVX512)
    return {_mm512_permutexvar_ps(indices.v, _mm512_loadu_ps(source))};
#elif defined(FUSIBLE_SIMD_AVX2)
    return {_mm256_permutevar8x32_ps(_mm256_loadu_ps(source), indices.v)};
#else
    return map<F32>(indices, [source](std::int32_t index) { return source[index]; });
#endif
}

/// For the g-th group of a chunk, lane by lane: which block after the chunk's first one the products of a lane belong to.
template <class Decoder, int kBlock>
struct BlocksOfLanes {
    alignas(64) std::int32_t at[Decoder::kGroups][kLanes] = {};
    bool one[Decoder::kGroups] = {};  // whether it is one for all lanes

    constexpr BlocksOfLanes() {
        for (int g = 0; g < Decoder::kGroups; ++g) {
            one[g] = true;
            for (int lane = 0; lane < kLanes; ++lane) {
                at[g][lane] = Decoder::element(g * Decoder::kVectors * kLanes + lane) / kBlock;
                one[g] = one[g] && at[g][lane] == at[g][0];
            }
        }
    }
};

/// The factors of the lanes of a group; `factors` are those from the chunk's first block on.
template <class Decoder, int kBlock>
inline F32 factors_of_lanes(const float* factors, int g) {
    static constexpr BlocksOfLanes<Decoder, kBlock> kBlocks;
    if (kBlocks.one[g]) return splat(factors[kBlocks.at[g][0]]);
    return lanes_at(factors, load_words(kBlocks.at[g]));
}

}  // namespace
}  // namespace fusible::codes::FUSIBLE_LEVEL
