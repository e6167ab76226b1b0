// Packed elements of a product: a unit is 32 bits, two bf16 that follow one another in the contracted dimension where the CPU has dot
// products of them, one float elsewhere. Both formats of FP8 are exact in either.
#pragma once

#include "cast/formats.hpp"
#include "simd/math.hpp"

namespace fusible {
namespace FUSIBLE_LEVEL {
namespace {

/// An FP8 code of format F, to be told from the bytes of another format.
template <class F>
struct code {
    std::uint8_t bits;
};

template <class F>
inline const std::uint8_t* bytes_of(const code<F>* source) {
    return reinterpret_cast<const std::uint8_t*>(source);
}

#if defined(__AVX512BF16__)

/// Elements of a unit.
constexpr int kDepth = 2;

struct Units {
    __m512i v;
};

inline Units load_units(const std::int32_t* source) { return {_mm512_loadu_si512(source)}; }
inline Units splat_unit(const std::int32_t* source) { return {_mm512_set1_epi32(*source)}; }
inline void store_units(std::int32_t* out, Units units) { _mm512_storeu_si512(out, units.v); }

/// sum + a0 b0 + a1 b1, in float. Subnormal products are zero.
inline F32 dot(F32 sum, Units a, Units b) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)}; }

/// bf16 of the subnormal codes, their low bytes and then their high ones: a byte shuffle by (code, code + 8) finds both at once.
template <class F>
struct SubnormalTable {
    alignas(16) std::uint8_t at[16] = {};

    constexpr SubnormalTable() {
        for (int m = 1; m < 1 << F::kMantissa; ++m) {
            int top = 0;
            while (m >> (top + 1) != 0) ++top;
            const int value = ((127 + top + 1 - F::kBias - F::kMantissa) << 7) | ((m << (7 - top)) & 0x7f);
            at[m] = static_cast<std::uint8_t>(value & 0xff);
            at[m + 8] = static_cast<std::uint8_t>(value >> 8);
        }
    }
};

/// bf16 values of codes in lanes of 16 bits.
template <class F>
inline Units decode_halves(__m512i codes) {
    static constexpr SubnormalTable<F> kTable;
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kTable.at)));
    const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
    const __m512i both_bytes = _mm512_or_si512(_mm512_or_si512(magnitude, _mm512_slli_epi16(magnitude, 8)), _mm512_set1_epi16(0x0800));
    const __mmask32 subnormal = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(1 << F::kMantissa));
    const __mmask32 beyond = _mm512_cmpgt_epu16_mask(magnitude, _mm512_set1_epi16(F::kLastFinite));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 7 - F::kMantissa), _mm512_set1_epi16((127 - F::kBias) << 7));
    const __m512i finite = _mm512_mask_mov_epi16(normal, subnormal, _mm512_shuffle_epi8(table, both_bytes));
    const __m512i special = _mm512_or_si512(normal, _mm512_set1_epi16(static_cast<short>(F::kBeyondBits >> 16)));
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)), 8);
    return {_mm512_or_si512(_mm512_mask_mov_epi16(finite, beyond, special), sign)};
}

/// kLanes units of elements that follow one another in the contracted dimension.
template <class F>
inline Units units_along(const code<F>* source) {
    return decode_halves<F>(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source))));
}

inline Units units_along(const bf16* source) { return {_mm512_loadu_si512(source)}; }

/// kLanes units of elements that follow one another in the other dimension, from the rows of the contracted one.
template <class F>
inline Units units_across(const code<F>* const (&rows)[kDepth]) {
    const I32 low = load_bytes(bytes_of(rows[0]));
    const I32 high = load_bytes(bytes_of(rows[1]));
    return decode_halves<F>(either(low, shift_left<16>(high)).v);
}

inline Units units_across(const bf16* const (&rows)[kDepth]) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[0])));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[1])));
    return {_mm512_or_si512(low, _mm512_slli_epi32(high, 16))};
}

#else

constexpr int kDepth = 1;

using Units = F32;

inline Units load_units(const std::int32_t* source) { return load(reinterpret_cast<const float*>(source)); }
inline Units splat_unit(const std::int32_t* source) { return splat(float_of(*source)); }
inline void store_units(std::int32_t* out, Units units) { store(reinterpret_cast<float*>(out), units); }
inline F32 dot(F32 sum, Units a, Units b) { return fma(a, b, sum); }

template <class S>
inline Units units_along(const S* source) {
    return load(source);
}

template <class F>
inline Units units_along(const code<F>* source) {
    return decode<F>(load_bytes(bytes_of(source)));
}

template <class S>
inline Units units_across(const S* const (&rows)[kDepth]) {
    return units_along(rows[0]);
}

#endif

/// Exchanges rows and columns of a square of units.
#if defined(FUSIBLE_SIMD_AVX512)

inline __m512i raw(F32 units) { return _mm512_castps_si512(units.v); }
template <class U>
inline __m512i raw(U units) {
    return units.v;
}

inline void set_raw(F32& units, __m512i value) { units.v = _mm512_castsi512_ps(value); }
template <class U>
inline void set_raw(U& units, __m512i value) {
    units.v = value;
}

inline void transpose_units(Units (&rows)[kLanes]) {
    __m512i a[16];
    __m512i b[16];
    for (int i = 0; i < 16; ++i) a[i] = raw(rows[i]);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // Lane L of a[4 g + j] holds column 4 L + j of rows 4 g .. 4 g + 3.
    for (int j = 0; j < 4; ++j) {
        const __m512i low01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44);
        const __m512i high01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xee);
        const __m512i low23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44);
        const __m512i high23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xee);
        set_raw(rows[j], _mm512_shuffle_i32x4(low01, low23, 0x88));
        set_raw(rows[4 + j], _mm512_shuffle_i32x4(low01, low23, 0xdd));
        set_raw(rows[8 + j], _mm512_shuffle_i32x4(high01, high23, 0x88));
        set_raw(rows[12 + j], _mm512_shuffle_i32x4(high01, high23, 0xdd));
    }
}

#elif defined(FUSIBLE_SIMD_AVX2)

inline void transpose_units(Units (&rows)[kLanes]) {
    __m256 a[8];
    __m256 b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
        a[i + 1] = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    for (int j = 0; j < 4; ++j) {
        rows[j].v = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
        rows[4 + j].v = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
    }
}

#else

inline void transpose_units(Units (&rows)[kLanes]) {
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < i; ++j) {
            const float swapped = rows[i].lane[j];
            rows[i].lane[j] = rows[j].lane[i];
            rows[j].lane[i] = swapped;
        }
}

#endif

}  // namespace
}  // namespace FUSIBLE_LEVEL
}  // namespace fusible
