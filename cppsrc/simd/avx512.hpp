// Sixteen lanes in 512-bit registers (AVX-512 F, BW, VL, DQ). The names mean what they mean in generic.hpp.
#pragma once

#include <immintrin.h>

#include "simd/scalar.hpp"

namespace fusible::simd::FUSIBLE_LEVEL {
namespace {

constexpr int kLanes = 16;

struct F32 {
    __m512 v;
};

struct I32 {
    __m512i v;
};

struct U16 {
    __m512i v;
};

inline F32 load(const float* source) { return {_mm512_loadu_ps(source)}; }

inline F32 load(const bf16* source) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}

inline F32 load(const f16* source) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)))}; }

inline F32 splat(float value) { return {_mm512_set1_ps(value)}; }
inline I32 splat(std::int32_t value) { return {_mm512_set1_epi32(value)}; }

inline I32 bits(F32 a) { return {_mm512_castps_si512(a.v)}; }
inline F32 floats(I32 a) { return {_mm512_castsi512_ps(a.v)}; }

inline F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 add_up(F32 a, F32 b) { return {_mm512_add_round_ps(a.v, b.v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC)}; }
inline F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }

inline I32 round_to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F32 from_int(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }

inline F32 select_less(F32 a, F32 b, F32 yes, F32 no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline F32 select_at_most(F32 a, F32 b, F32 yes, F32 no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ), no.v, yes.v)};
}

inline float sum_lanes(F32 a) {
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

inline F32 sums_of_lanes(const F32 (&a)[kLanes]) {
    __m512 eights[8];  // of a[i] and a[i + 8], where i and i + 4 are neighbours
    for (int i = 0; i < 8; ++i) {
        const __m512 first = a[i / 2 + i % 2 * 4].v, second = a[i / 2 + i % 2 * 4 + 8].v;
        eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x44), _mm512_shuffle_f32x4(first, second, 0xee));
    }
    __m512 fours[4];  // of a[i], a[i + 8], a[i + 4] and a[i + 12]
    for (int i = 0; i < 4; ++i) {
        const __m512 first = eights[2 * i], second = eights[2 * i + 1];
        fours[i] = _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xdd));
    }
    __m512 twos[2];
    for (int i = 0; i < 2; ++i) {
        const __m512d first = _mm512_castps_pd(fours[2 * i]), second = _mm512_castps_pd(fours[2 * i + 1]);
        twos[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)), _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
    }
    const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(twos[0], twos[1], 0x88), _mm512_shuffle_ps(twos[0], twos[1], 0xdd));
    return {_mm512_shuffle_f32x4(sums, sums, 0xd8)};
}

inline F32 swap_pairs(F32 a) { return {_mm512_permute_ps(a.v, 0xb1)}; }

inline float max_lanes(F32 a) {
    const __m256 halves = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}

inline I32 add(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I32 min(I32 a, I32 b) { return {_mm512_min_epi32(a.v, b.v)}; }
inline I32 max(I32 a, I32 b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline I32 both(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I32 either(I32 a, I32 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I32 exclusive_or(I32 a, I32 b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline I32 mul_low(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline I32 load_words(const void* source) { return {_mm512_loadu_si512(source)}; }
inline void store_words(void* out, I32 words) { _mm512_storeu_si512(out, words.v); }

template <int N>
inline I32 shift_left(I32 a) {
    return {_mm512_slli_epi32(a.v, N)};
}

template <int N>
inline I32 shift_right(I32 a) {
    return {_mm512_srli_epi32(a.v, N)};
}

inline I32 where_above(I32 a, std::int32_t limit, std::int32_t value) {
    return {_mm512_maskz_set1_epi32(_mm512_cmpgt_epi32_mask(a.v, _mm512_set1_epi32(limit)), value)};
}

inline I32 join_sign(I32 a, I32 b) {
    constexpr int kSelect = 0xca;  // mask ? b : a, bit by bit
    return {_mm512_ternarylogic_epi32(_mm512_set1_epi32(0x80), b.v, a.v, kSelect)};
}

inline void store(float* out, F32 value) { _mm512_storeu_ps(out, value.v); }

// VCVTNEPS2BF16 would flush subnormals, so the rounding is done on integers at this level and the next.
inline void store(bf16* out, F32 value) {
    const __m512i raw = _mm512_castps_si512(value.v);
    const __m512i top = _mm512_srli_epi32(raw, 16);
    const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(raw, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value.v, value.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, is_nan, top, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(rounded));
}

inline void store(f16* out, F32 value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(value.v, _MM_FROUND_TO_NEAREST_INT));
}

inline I32 load_bytes(const std::uint8_t* source) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)))};
}

inline void store_bytes(std::uint8_t* out, const I32 (&codes)[4]) {
    for (int i = 0; i < 4; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * i), _mm512_cvtepi32_epi8(codes[i].v));
}

struct Bytes {
    __m512i v;
};

inline Bytes join_signs(const I32 (&codes)[4], const F32 (&signs)[4]) {
    const __m512i seven = _mm512_set1_epi32(0x7f);
    const auto pack = [](__m512i a, __m512i b) { return _mm512_packs_epi32(a, b); };  // signs stay what they are where it saturates
    const __m512i low = pack(_mm512_and_si512(codes[0].v, seven), _mm512_and_si512(codes[1].v, seven));
    const __m512i high = pack(_mm512_and_si512(codes[2].v, seven), _mm512_and_si512(codes[3].v, seven));
    const __m512i of_low = pack(bits(signs[0]).v, bits(signs[1]).v);
    const __m512i of_high = pack(bits(signs[2]).v, bits(signs[3]).v);
    constexpr int kFirstOrSecondAndThird = 0xf8;  // a | (b & c)
    const __m512i joined = _mm512_ternarylogic_epi32(_mm512_packs_epi16(low, high), _mm512_packs_epi16(of_low, of_high), _mm512_set1_epi8(-128),
                                                     kFirstOrSecondAndThird);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);  // the packs work in 128-bit quarters
    return {_mm512_permutexvar_epi32(order, joined)};
}

inline void store_bytes(std::uint8_t* out, Bytes bytes) { _mm512_storeu_si512(out, bytes.v); }

inline __m512i lower_nibbles(Bytes a) {
    constexpr int kFirstOrSecondInThird = 0xa8;  // (a | b) & c
    return _mm512_ternarylogic_epi32(a.v, _mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(0x0f), kFirstOrSecondInThird);
}

inline Bytes join_nibbles(Bytes lower, Bytes upper) {
    constexpr int kSelect = 0xca;  // mask ? b : a, bit by bit
    const __m512i above = _mm512_or_si512(upper.v, _mm512_slli_epi16(upper.v, 4));
    return {_mm512_ternarylogic_epi32(_mm512_set1_epi8(-16), above, lower_nibbles(lower), kSelect)};
}

inline void store_nibbles(std::uint8_t* out, Bytes codes) {
    const __m512i pairs = _mm512_maddubs_epi16(lower_nibbles(codes), _mm512_set1_epi16(0x1001));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi16_epi8(pairs));
}

inline std::int32_t max_lane(I32 a) {
    const __m256i halves = _mm256_max_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti64x4_epi64(a.v, 1));
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtsi128_si32(half);
}

/// Lane i of the result is the largest lane of x[i].
inline I32 largest_of_each(const I32 (&x)[kLanes]) {
    __m512i of_quarters[4];  // a vector for four of x, with one lane for each in every 128 bits
    for (int i = 0; i < 4; ++i) {
        const I32* const of = x + 4 * i;
        const __m512i first = _mm512_max_epi32(_mm512_unpacklo_epi32(of[0].v, of[1].v), _mm512_unpackhi_epi32(of[0].v, of[1].v));
        const __m512i second = _mm512_max_epi32(_mm512_unpacklo_epi32(of[2].v, of[3].v), _mm512_unpackhi_epi32(of[2].v, of[3].v));
        of_quarters[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    }
    const auto halve = [](__m512i a, __m512i b) {
        return _mm512_max_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    };
    return {halve(halve(of_quarters[0], of_quarters[1]), halve(of_quarters[2], of_quarters[3]))};
}

inline U16 load_halves(const void* source) { return {_mm512_loadu_si512(source)}; }
inline void store_halves(void* out, U16 halves) { _mm512_storeu_si512(out, halves.v); }
inline void store_lower(std::uint16_t* out, I32 words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(words.v)); }

inline U16 splat(std::uint16_t value) { return {_mm512_set1_epi16(static_cast<short>(value))}; }
inline U16 add(U16 a, U16 b) { return {_mm512_add_epi16(a.v, b.v)}; }
inline U16 sub_saturated(U16 a, U16 b) { return {_mm512_subs_epu16(a.v, b.v)}; }
inline U16 min(U16 a, U16 b) { return {_mm512_min_epi16(a.v, b.v)}; }
inline U16 max(U16 a, U16 b) { return {_mm512_max_epi16(a.v, b.v)}; }
inline U16 both(U16 a, U16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline U16 either(U16 a, U16 b) { return {_mm512_or_si512(a.v, b.v)}; }

template <int N>
inline U16 shift_right(U16 a) {
    return {_mm512_srli_epi16(a.v, N)};
}

inline bool any(U16 a) { return _mm512_test_epi32_mask(a.v, a.v) != 0; }

inline I32 larger_of_pairs(U16 a) {
    return {_mm512_max_epi32(_mm512_slli_epi32(a.v, 16), _mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<std::int32_t>(0xffff0000u))))};
}

inline void store_bytes(std::uint8_t* out, const U16 (&codes)[2]) {
    for (int i = 0; i < 2; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32 * i), _mm512_cvtepi16_epi8(codes[i].v));
}

}  // namespace
}  // namespace fusible::simd::FUSIBLE_LEVEL
