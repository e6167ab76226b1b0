// Codes with scales of blocks along the contracted dimension, read as units of their values. Units of two bf16 are those of values that bf16 holds
// (scaling.hpp says which these are): powers of two are added to exponents, and of a code of four bits and its scale, a product of six bits at most,
// there is a table. Units of one float are products in float.
#pragma once

#include "cast/e2m1.hpp"
#include "cast/exponents.hpp"
#include "cast/kernels.hpp"
#include "gemm/kernels.hpp"
#include "gemm/pack.hpp"

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;
using namespace cast::FUSIBLE_LEVEL;

#if defined(__AVX512BF16__)

/// By what the bits of bf16 grow where they are multiplied by powers of two.
struct Factors {
    __m512i growth;
};

/// 2^(exponent - 127).
inline Factors powers(int exponent) { return {_mm512_set1_epi16(static_cast<short>((exponent - 127) * 128))}; }

/// The same of a vector of E8M0, a unit each.
inline Factors powers_of_bytes(const std::uint8_t* bytes) {
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    const __m512i twins = _mm512_or_si512(codes, _mm512_slli_epi32(codes, 16));
    return {_mm512_slli_epi16(_mm512_sub_epi16(twins, _mm512_set1_epi16(127)), 7)};
}

struct ScaleBytes {
    static constexpr int kBlock = cast::kMxBlock;
    using Scale = std::uint8_t;
    static Factors read(std::uint8_t code) { return powers(code); }
    static Units times(const std::uint8_t* codes, const std::uint8_t* scales, bool whole);
};

struct ScaleFloats {
    static constexpr int kBlock = cast::kScaledBlock;
    using Scale = float;
    static Factors read(float scale) { return powers(bits_of(scale) >> 23); }
};

/// Numbers times powers of two; zeros and what is no number stay what they are.
inline Units scaled(Units units, Factors factors) {
    const __m512i sizes = _mm512_add_epi16(units.v, units.v);  // without their signs
    const __mmask32 numbers = _mm512_cmplt_epu16_mask(_mm512_sub_epi16(sizes, _mm512_set1_epi16(1)), _mm512_set1_epi16(static_cast<short>(0xfeff)));
    return {_mm512_mask_add_epi16(units.v, numbers, units.v, factors.growth)};
}

/// The bf16 of each code of four bits times each scale.
struct ProductsOfFours {
    alignas(32) std::uint16_t at[256][16] = {};

    constexpr ProductsOfFours() {
        for (int scale = 0; scale < 256; ++scale)
            for (int code = 0; code < 16; ++code) {
                const int sign = (scale >> 7 ^ code >> 3) << 15;
                at[scale][code] = static_cast<std::uint16_t>(sign | product_of(code & 7, scale & 0x7f));
            }
    }

    static constexpr int product_of(int code, int scale) {
        constexpr int kHalves[] = {0, 1, 2, 3, 4, 6, 8, 12};
        if (scale == E4M3::kNanCode) return E4M3::kBeyondBits >> 16;
        const int exponent = scale >> E4M3::kMantissa == 0 ? 1 : scale >> E4M3::kMantissa;
        const int product = kHalves[code] * (scale >> E4M3::kMantissa == 0 ? scale : (scale & 7) | 8);
        if (product == 0) return 0;
        int top = 0;
        while (product >> (top + 1) != 0) ++top;
        return ((127 + top + exponent - E4M3::kBias - E4M3::kMantissa - 1) << 7) | ((product << (7 - top)) & 0x7f);
    }
};

/// A run of codes of four bits, of two blocks.
inline Units units_of_fours(const std::uint8_t* codes, std::uint8_t first, std::uint8_t second) {
    static constexpr ProductsOfFours kProducts;
    const __m512i low = _mm512_castsi256_si512(_mm256_load_si256(reinterpret_cast<const __m256i*>(kProducts.at[first])));
    const __m512i table = _mm512_inserti64x4(low, _mm256_load_si256(reinterpret_cast<const __m256i*>(kProducts.at[second])), 1);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m512i pairs = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));  // each 16 bits begin with a code
    const __m512i half = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    constexpr int kSelect = 0xea;  // (a & b) | c, bit by bit
    return {_mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(pairs, _mm512_set1_epi16(15), half, kSelect), table)};
}

#else

using Factors = F32;

inline Factors powers_of_bytes(const std::uint8_t* bytes) { return power_of(load_bytes(bytes)); }

struct ScaleBytes {
    static constexpr int kBlock = cast::kMxBlock;
    using Scale = std::uint8_t;
    static Factors read(std::uint8_t code) { return splat(power_of(std::int32_t{code})); }
    static Units times(const std::uint8_t* codes, const std::uint8_t* scales, bool whole);
};

struct ScaleFloats {
    static constexpr int kBlock = cast::kScaledBlock;
    using Scale = float;
    static Factors read(float scale) { return splat(scale); }
};

inline Units scaled(Units units, Factors factors) { return mul(units, factors); }

/// The values of E4M3.
struct ValuesOfScales {
    std::int32_t at[256] = {};

    constexpr ValuesOfScales() {
        for (int code = 0; code < 128; ++code) {
            at[code] = half_of_code<E4M3>(code) << 16;
            at[128 + code] = at[code] | static_cast<std::int32_t>(0x80000000u);
        }
    }
};

/// kLanes codes of four bits, a lane each, in its lowest bits.
inline I32 fours_along(const std::uint8_t* codes) {
#if defined(FUSIBLE_SIMD_AVX512)
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    return {_mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28))};
#elif defined(FUSIBLE_SIMD_AVX2)
    int four;
    std::memcpy(&four, codes, sizeof four);
    const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
    return {_mm256_or_si256(bytes, _mm256_slli_epi64(bytes, 28))};
#else
    I32 fours;
    for (int i = 0; i < kLanes; ++i) fours.lane[i] = codes[i / 2] >> (4 * (i % 2));
    return fours;
#endif
}

/// A run of codes of four bits, of one block.
inline Units units_of_fours(const std::uint8_t* codes, std::uint8_t scale, std::uint8_t) {
    static constexpr ValuesOfScales kValues;
    return mul(decode_nibbles(fours_along(codes)), splat(float_of(kValues.at[scale])));
}

#endif

/// FP8, whose scales are powers of two where units are bf16.
template <class F, class Scales>
struct CodedEights {
    const CodedRows& rows;

    Units at(std::int64_t r, std::int64_t k, std::int64_t count) const {
        const auto* const codes = reinterpret_cast<const code<F>*>(rows.codes + r * rows.stride + k);
        const auto* const scales = static_cast<const typename Scales::Scale*>(rows.scales) + r * rows.scale_row_step;
        return scaled(units_along(codes, count), Scales::read(scales[k / Scales::kBlock * rows.scale_block_step]));
    }
};

/// Scales of E4M3. Of a run, `whole` or not, of codes of four bits: its units.
struct SmallScales {
    static constexpr int kBlock = cast::kFp4Block;

    static Units times(const std::uint8_t* codes, const std::uint8_t* scales, bool whole) {
        return units_of_fours(codes, scales[0], whole ? scales[kRun > kBlock ? 1 : 0] : 0);
    }
};

/// The same of powers of two: a run lies in one block.
inline Units ScaleBytes::times(const std::uint8_t* codes, const std::uint8_t* scales, bool) {
    constexpr std::uint8_t kOne = E4M3::kBias << E4M3::kMantissa;
    static_assert(kBlock % kRun == 0);
    return scaled(units_of_fours(codes, kOne, kOne), read(scales[0]));
}

/// Codes of four bits with a byte for each block, whole blocks.
template <class Scales>
struct CodedFours {
    const CodedRows& rows;

    Units at(std::int64_t r, std::int64_t k, std::int64_t count) const {
        const std::uint8_t* codes = rows.codes + r * rows.stride + k / 2;
        const std::uint8_t* const scales = static_cast<const std::uint8_t*>(rows.scales) + r * rows.scale_row_step + k / Scales::kBlock;
        if (count >= kRun) return Scales::times(codes, scales, true);
        std::uint8_t padded[kRun / 2] = {};
        std::memcpy(padded, codes, static_cast<std::size_t>(count / 2));
        return Scales::times(padded, scales, false);
    }
};

template <class Reader>
void pack_coded_rows(const CodedRows& source, std::int64_t rows, std::int64_t depth, std::int32_t* out, std::int64_t out_stride) {
    pack_all_rows(Reader{source}, rows, depth, out, out_stride);
}

template <class Reader>
void pack_coded_tiles(const CodedRows& source, std::int64_t rows, std::int64_t depth, std::int32_t* out, std::int64_t out_stride) {
    tile_rows(Reader{source}, rows, depth, out, out_stride);
}

template <class Reader>
void pack_coded_turned(const CodedRows& source, std::int64_t rows, std::int64_t depth, std::int32_t* out) {
    turn_rows(Reader{source}, rows, depth, out);
}

/// kLanes columns of two rows (of one, where that is a unit), of which there are `count`.
template <class F>
inline Units coded_across(const std::uint8_t* codes, std::ptrdiff_t stride, std::int64_t count) {
    code<F> padded[kDepth][kLanes] = {};
    const code<F>* rows[kDepth];
    for (int d = 0; d < kDepth; ++d) {
        rows[d] = reinterpret_cast<const code<F>*>(codes + d * stride);
        if (count >= kLanes) continue;
        std::memcpy(static_cast<void*>(padded[d]), rows[d], static_cast<std::size_t>(count));
        rows[d] = padded[d];
    }
    return units_across(rows);
}

/// What a matrix of FP8 that is contiguous in its width, with a byte of E8M0 for each kMxBlock rows of a column, has of `elements` rows from the k-th on,
/// all in one block, and of `count` columns from the j-th on, at most kLanes: units of depth, `out_stride` apart.
template <class F>
inline void coded_block_across(const CodedRows& source, std::int64_t k, std::int64_t elements, std::int64_t j, std::int64_t count, std::int32_t* out,
                               std::int64_t out_stride) {
    const auto* const bytes = static_cast<const std::uint8_t*>(source.scales) + k / cast::kMxBlock * source.scale_block_step;
    std::uint8_t padded[kLanes] = {};
    std::memcpy(padded, bytes + j, static_cast<std::size_t>(count));
    const Factors factors = powers_of_bytes(padded);
    for (std::int64_t d = 0; d < elements; d += kDepth) {
        const std::uint8_t* const codes = source.codes + (k + d) * source.stride + j;
        for (int i = 0; i < kDepth; ++i) __builtin_prefetch(codes + (kAhead + i) * source.stride);
        store_units(out + d / kDepth * out_stride, scaled(coded_across<F>(codes, source.stride, count), factors));
    }
}

/// Such a matrix [depth, width], whole blocks: out[u][j], `out_stride` units apart, where vectors have columns.
template <class F>
void pack_coded_across(const CodedRows& source, std::int64_t depth, std::int64_t width, std::int32_t* out, std::int64_t out_stride) {
    for (std::int64_t k = 0; k < depth; k += cast::kMxBlock)
        for (std::int64_t j = 0; j < width; j += kLanes) {
            const std::int64_t count = width - j < kLanes ? width - j : kLanes;
            coded_block_across<F>(source, k, cast::kMxBlock, j, count, out + k / kDepth * out_stride + j, out_stride);
        }
}

/// Such a matrix in squares of its columns.
template <class F>
void pack_coded_tiles_down(const CodedRows& source, std::int64_t depth, std::int64_t width, std::int32_t* out, std::int64_t out_stride) {
    static_assert(cast::kMxBlock % kRun == 0, "a square has one block of each column");
    const auto across = [&](std::int64_t k, std::int64_t elements, std::int64_t j, std::int64_t some, std::int32_t* square) {
        coded_block_across<F>(source, k, elements, j, some, square, kLanes);
    };
    tile_columns(across, depth, width, out, out_stride);
}

}  // namespace
}  // namespace fusible::gemm::FUSIBLE_LEVEL
