// Packed elements of a product: a unit is 32 bits, two bf16 that follow one another in the contracted dimension where the CPU has dot
// products of them, one float elsewhere. Both formats of FP8 are exact in either.
#pragma once

#include <cstring>

#include "cast/formats.hpp"
#include "simd/math.hpp"

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;
using namespace cast::FUSIBLE_LEVEL;

/// An FP8 code of format F, to be told from the bytes of another format.
template <class F>
struct code {
    std::uint8_t bits;
};

/// The unit at `source`, which may be elements of an operand as they lie.
inline std::int32_t unit_at(const std::int32_t* source) {
    std::int32_t unit;
    std::memcpy(&unit, source, sizeof(unit));
    return unit;
}

/// The bits as bf16 of a code's value, but for its sign.
template <class F>
constexpr int half_of_code(int code) {
    const int normal = (code << (7 - F::kMantissa)) + ((127 - F::kBias) << 7);
    if (code > F::kLastFinite) return normal | (F::kBeyondBits >> 16);
    if (code >> F::kMantissa != 0 || code == 0) return code == 0 ? 0 : normal;
    int top = 0;  // a subnormal code: its highest bit becomes the implicit one
    while (code >> (top + 1) != 0) ++top;
    return ((127 + top + 1 - F::kBias - F::kMantissa) << 7) | ((code << (7 - top)) & 0x7f);
}

#if defined(__AVX512BF16__)

/// Elements of a unit.
constexpr int kDepth = 2;

struct Units {
    __m512i v;
};

inline Units load_units(const std::int32_t* source) { return {_mm512_loadu_si512(source)}; }
inline Units splat_unit(const std::int32_t* source) { return {_mm512_set1_epi32(unit_at(source))}; }
inline void store_units(std::int32_t* out, Units units) { _mm512_storeu_si512(out, units.v); }
inline Units zero_units() { return {_mm512_setzero_si512()}; }

/// sum + a0 b0 + a1 b1, in float. Subnormal products are zero.
inline F32 dot(F32 sum, Units a, Units b) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)}; }

/// The bf16 of every code but for its sign, low bytes and high bytes apart: a permutation of bytes looks up 64 at once among 128.
template <class F>
struct DecodeTable {
    alignas(64) std::uint8_t low[128] = {};
    alignas(64) std::uint8_t high[128] = {};

    constexpr DecodeTable() {
        for (int code = 0; code < 128; ++code) {
            const int value = half_of_code<F>(code);
            low[code] = static_cast<std::uint8_t>(value & 0xff);
            high[code] = static_cast<std::uint8_t>(value >> 8);
        }
    }
};

/// bf16 values of codes that stand in both bytes of each 16-bit lane.
template <class F>
inline Units decode_twins(__m512i twins) {
    static constexpr DecodeTable<F> kTable;
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kTable.low), twins, _mm512_load_si512(kTable.low + 64));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(kTable.high), twins, _mm512_load_si512(kTable.high + 64));
    constexpr int kSelect = 0xf8;  // a | (b & c), bit by bit
    const __m512i magnitude = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, low, high);
    return {_mm512_ternarylogic_epi32(magnitude, twins, _mm512_set1_epi32(static_cast<std::int32_t>(0x80008000)), kSelect)};
}

/// The bf16 values of 64 codes: low and high bytes come out of a lookup each, and are joined within 128 bits. So of each sixteen codes the first vector
/// has eight, and the second one the others.
template <class F>
inline void decode_joined(__m512i codes, __m512i (&halves)[2]) {
    static constexpr DecodeTable<F> kTable;
    constexpr int kSelect = 0xf8;  // a | (b & c), bit by bit
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kTable.low), codes, _mm512_load_si512(kTable.low + 64));
    const __m512i size = _mm512_permutex2var_epi8(_mm512_load_si512(kTable.high), codes, _mm512_load_si512(kTable.high + 64));
    const __m512i high = _mm512_ternarylogic_epi32(size, codes, _mm512_set1_epi8(static_cast<char>(0x80)), kSelect);
    halves[0] = _mm512_unpacklo_epi8(low, high);
    halves[1] = _mm512_unpackhi_epi8(low, high);
}

/// Byte i of the result is byte `at[i]` of its operands.
struct ByteOrder {
    alignas(64) std::uint8_t at[64] = {};

    /// Twins of the bytes of one operand, in order; or, from two, of each in turn.
    constexpr explicit ByteOrder(bool in_turn) {
        for (int i = 0; i < 64; ++i) at[i] = static_cast<std::uint8_t>(in_turn ? i / 4 + (i / 2 % 2) * 64 : i / 2);
    }
};

/// kLanes units of elements that follow one another in the contracted dimension.
template <class F>
inline Units units_along(const code<F>* source) {
    static constexpr ByteOrder kTwins(false);
    const __m512i codes = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
    return decode_twins<F>(_mm512_permutexvar_epi8(_mm512_load_si512(kTwins.at), codes));
}

/// kLanes units of elements that follow one another in the other dimension, from the rows of the contracted one.
template <class F>
inline Units units_across(const code<F>* const (&rows)[kDepth]) {
    static constexpr ByteOrder kInTurn(true);
    const __m512i first = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[0])));
    const __m512i second = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[1])));
    return decode_twins<F>(_mm512_permutex2var_epi8(first, _mm512_load_si512(kInTurn.at), second));
}

inline Units units_along(const bf16* source) { return {_mm512_loadu_si512(source)}; }

/// Vectors of units that are cheaper to decode together.
template <class S>
constexpr int kRunsTogether = 1;
template <class F>
constexpr int kRunsTogether<code<F>> = 2;

template <class F>
inline void units_along(const code<F>* source, Units (&runs)[2]) {
    const __m512i in_turn = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // eights of the first run, and of the second
    __m512i halves[2];
    decode_joined<F>(_mm512_permutexvar_epi64(in_turn, _mm512_loadu_si512(source)), halves);
    runs[0] = {halves[0]};
    runs[1] = {halves[1]};
}

inline Units units_across(const bf16* const (&rows)[kDepth]) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[0])));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[1])));
    return {_mm512_or_si512(low, _mm512_slli_epi32(high, 16))};
}

#else

constexpr int kDepth = 1;

template <class S>
constexpr int kRunsTogether = 1;

using Units = F32;

inline Units load_units(const std::int32_t* source) { return load(reinterpret_cast<const float*>(source)); }
inline Units splat_unit(const std::int32_t* source) { return splat(float_of(unit_at(source))); }
inline void store_units(std::int32_t* out, Units units) { store(reinterpret_cast<float*>(out), units); }
inline Units zero_units() { return splat(0.0f); }
inline F32 dot(F32 sum, Units a, Units b) { return fma(a, b, sum); }

template <class S>
inline Units units_along(const S* source) {
    return load(source);
}

template <class F>
inline Units units_along(const code<F>* source) {
    return decode<F>(load_bytes(reinterpret_cast<const std::uint8_t*>(source)));
}

template <class S>
inline Units units_across(const S* const (&rows)[kDepth]) {
    return units_along(rows[0]);
}

#endif

/// kRunsTogether vectors of units.
template <class S>
inline void units_along(const S* source, Units (&runs)[1]) {
    runs[0] = units_along(source);
}

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
}  // namespace fusible::gemm::FUSIBLE_LEVEL
