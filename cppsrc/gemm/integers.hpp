// Products of two operands of four bits, by dot products of bytes: a code of E2M1 is half an integer of at most 12, so that the dot product of two blocks
// is exact in 32 bits, and a unit is four elements where bf16 has two. It becomes a float, which holds it, and is added times the product of both scales,
// which is exact, too, in one rounding: one for each block, where products of bf16 have more.
//
// The instruction takes bytes without signs of A: its integers are kept 12 larger, and sums begin with what that adds, times -1 (`offsets` below).
#pragma once

#include <cstring>
#include <type_traits>

#include "gemm/scaled_sums.hpp"

#if defined(FUSIBLE_GEMM_SCALES_SUMS)

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// What makes an integer of A one without a sign.
constexpr int kOffset = 12;

constexpr int kBytesOfUnit = 4;

constexpr int kCodesOfVector = kBytesOfUnit * kLanes;

/// The integers of the codes, twice their values, in every fourth of a vector; `offset` larger.
struct IntegersOfCodes {
    alignas(64) std::int8_t at[64] = {};

    constexpr explicit IntegersOfCodes(int offset) {
        constexpr int kIntegers[] = {0, 1, 2, 3, 4, 6, 8, 12};
        for (int i = 0; i < 64; ++i) at[i] = static_cast<std::int8_t>((i & 8 ? -kIntegers[i & 7] : kIntegers[i & 7]) + offset);
    }
};

/// The integers of 64 codes, or of so many as there are, whole units.
template <int offset>
inline Units integers_of(const std::uint8_t* codes, std::int64_t count) {
    static constexpr IntegersOfCodes kIntegers(offset);
    const auto present = static_cast<__mmask32>(count >= kCodesOfVector ? ~0u : (1u << (count / 2)) - 1);
    const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(present, codes));
    const __m512i apart = _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4)), _mm512_set1_epi8(15));
    return {_mm512_shuffle_epi8(_mm512_load_si512(kIntegers.at), apart)};
}

inline __m512i dot_of_bytes(__m512i sum, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sum, a, b); }

/// Half of what each byte of scales is, for integers are twice the values: bits of floats. Powers of two that are not plain belong to zeros (scaling.hpp),
/// and are zero: products of two such might be infinite.
template <class Scales>
struct HalvesOfScales {
    std::int32_t at[256] = {};

    constexpr HalvesOfScales() {
        for (int byte = 0; byte < 256; ++byte) {
            if constexpr (std::is_same_v<Scales, ScaleBytes>) {
                at[byte] = byte > 127 - cast::kPlainExponent && byte < 127 + cast::kPlainExponent ? (byte - 1) << 23 : 0;
            } else {
                const std::int32_t size = half_of_code<E4M3>(byte & 0x7f) << 16;
                at[byte] = (size == 0 || size >> 23 == 255 ? size : size - (1 << 23)) | (byte > 127 ? INT32_MIN : 0);
            }
        }
    }
};

/// The factors of the blocks of rows: out[i][r], `width` apart.
template <class Scales>
void write_halves(const CodedRows& source, std::int64_t rows, std::int64_t blocks, std::int32_t* out, std::int64_t width) {
    static constexpr HalvesOfScales<Scales> kHalves;
    for (std::int64_t r = 0; r < rows; ++r) {
        const std::uint8_t* const scales = static_cast<const std::uint8_t*>(source.scales) + r * source.scale_row_step;
        for (std::int64_t i = 0; i < blocks; ++i) out[i * width + r] = kHalves.at[scales[i]];
    }
}

/// Rows of A: out[r][u], and behind all of them their factors.
template <class Scales>
void pack_integers(const CodedRows& source, std::int64_t rows, std::int64_t depth, std::int32_t* out, std::int64_t out_stride) {
    for (std::int64_t r = 0; r < rows; ++r) {
        const std::uint8_t* const codes = source.codes + r * source.stride;
        for (std::int64_t k = 0; k < depth; k += kCodesOfVector)
            store_units(out + r * out_stride + k / kBytesOfUnit, integers_of<kOffset>(codes + k / 2, depth - k));
    }
    write_halves<Scales>(source, rows, depth / Scales::kBlock, out + rows * out_stride, rows);
}

/// Units of a block of so many elements.
constexpr int units_of_block(int elements) { return elements / kBytesOfUnit; }

/// From where on a micro-panel of B has what the sums of its blocks begin with, a row for each: behind its units and its factors.
constexpr std::int64_t offsets_at(std::int64_t units, std::int64_t blocks) { return (units + blocks) * kScaledCols; }

/// A micro-panel of B, turned, out[u][r], with factors and offsets: zeros for the rows that it lacks.
template <class Scales>
void pack_turned_integers(const CodedRows& source, std::int64_t rows, std::int64_t depth, std::int32_t* out) {
    constexpr std::int64_t kUnits = units_of_block(Scales::kBlock);
    const std::int64_t units = depth / kBytesOfUnit;
    for (std::int64_t u = 0; u < units; u += kLanes) {
        for (int v = 0; v < kScaledVectors; ++v) {
            Units square[kLanes];
            for (int r = 0; r < kLanes; ++r) {
                const std::int64_t row = v * kLanes + r;
                const std::int64_t k = u * kBytesOfUnit;
                square[r] = row < rows ? integers_of<0>(source.codes + row * source.stride + k / 2, depth - k) : zero_units();
            }
            transpose_units(square);
            for (std::int64_t i = 0; i < kLanes && u + i < units; ++i) store_units(out + (u + i) * kScaledCols + v * kLanes, square[i]);
        }
    }
    if (rows < kScaledCols) std::memset(out + units * kScaledCols, 0, static_cast<std::size_t>(units / kUnits * kScaledCols) * sizeof(*out));
    write_halves<Scales>(source, rows, units / kUnits, out + units * kScaledCols, kScaledCols);
    const __m512i offset = _mm512_set1_epi8(kOffset);
    std::int32_t* const offsets = out + offsets_at(units, units / kUnits);
    for (std::int64_t i = 0; i < units / kUnits; ++i)
        for (int v = 0; v < kScaledVectors; ++v) {
            __m512i sum = _mm512_setzero_si512();
            for (std::int64_t u = i * kUnits; u < (i + 1) * kUnits; ++u) sum = dot_of_bytes(sum, offset, load_units(out + u * kScaledCols + v * kLanes).v);
            store_units(offsets + i * kScaledCols + v * kLanes, {_mm512_sub_epi32(_mm512_setzero_si512(), sum)});
        }
}

/// Products of integers as they are added up within a block of Scales.
template <class Scales>
struct DotsOfIntegers {
    using Sum = __m512i;

    static constexpr int kBlockUnits = units_of_block(Scales::kBlock);

    static Sum begin(const std::int32_t* offsets) { return load_units(offsets).v; }
    static Sum dot(Sum sum, Units a, Units b) { return dot_of_bytes(sum, a.v, b.v); }
    static F32 total(Sum sum) { return {_mm512_cvtepi32_ps(sum)}; }
};

/// As `multiply`, of operands whose blocks have one length.
void multiply_integers(const Block& block) {
    using Longer = DotsOfIntegers<ScaleBytes>;
    block.factor_units == Longer::kBlockUnits ? multiply_scaled<Longer>(block) : multiply_scaled<DotsOfIntegers<SmallScales>>(block);
}

}  // namespace
}  // namespace fusible::gemm::FUSIBLE_LEVEL

#endif
