// Eight lanes in 256-bit registers (AVX2, F16C). The names mean what they mean in generic.hpp.
#pragma once

#include <immintrin.h>

#include "simd/scalar.hpp"

namespace fusible::simd::FUSIBLE_LEVEL {
namespace {

constexpr int kLanes = 8;

// A struct each, since a bare __m256 loses its attributes as a template argument, and to tell floats from integers.
struct F32 {
    __m256 v;
};

struct I32 {
    __m256i v;
};

struct U16 {
    __m256i v;
};

inline F32 load(const float* source) { return {_mm256_loadu_ps(source)}; }

inline F32 load(const bf16* source) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))};
}

inline F32 load(const f16* source) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)))}; }

inline F32 splat(float value) { return {_mm256_set1_ps(value)}; }
inline I32 splat(std::int32_t value) { return {_mm256_set1_epi32(value)}; }

inline I32 bits(F32 a) { return {_mm256_castps_si256(a.v)}; }
inline F32 floats(I32 a) { return {_mm256_castsi256_ps(a.v)}; }

inline F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }

inline F32 add_up(F32 a, F32 b) {
    const __m256 sum = _mm256_add_ps(a.v, b.v);
    const __m256 lost = _mm256_cmp_ps(_mm256_sub_ps(sum, b.v), a.v, _CMP_LT_OQ);
    return {_mm256_castsi256_ps(_mm256_sub_epi32(_mm256_castps_si256(sum), _mm256_castps_si256(lost)))};
}
inline I32 round_to_int(F32 a) { return {_mm256_cvtps_epi32(a.v)}; }
inline F32 from_int(I32 a) { return {_mm256_cvtepi32_ps(a.v)}; }

inline F32 select_less(F32 a, F32 b, F32 yes, F32 no) { return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))}; }
inline F32 select_at_most(F32 a, F32 b, F32 yes, F32 no) { return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ))}; }

inline float sum_lanes(F32 a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

inline F32 sums_of_lanes(const F32 (&a)[kLanes]) {
    __m256 fours[4];  // of a[i] and a[i + 4]
    for (int i = 0; i < 4; ++i) {
        fours[i] = _mm256_add_ps(_mm256_permute2f128_ps(a[i].v, a[i + 4].v, 0x20), _mm256_permute2f128_ps(a[i].v, a[i + 4].v, 0x31));
    }
    __m256 twos[2];
    for (int i = 0; i < 2; ++i) {
        const __m256d first = _mm256_castps_pd(fours[2 * i]), second = _mm256_castps_pd(fours[2 * i + 1]);
        twos[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(first, second)), _mm256_castpd_ps(_mm256_unpackhi_pd(first, second)));
    }
    return {_mm256_add_ps(_mm256_shuffle_ps(twos[0], twos[1], 0x88), _mm256_shuffle_ps(twos[0], twos[1], 0xdd))};
}

inline F32 swap_pairs(F32 a) { return {_mm256_permute_ps(a.v, 0xb1)}; }

inline float max_lanes(F32 a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}

inline I32 add(I32 a, I32 b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline I32 min(I32 a, I32 b) { return {_mm256_min_epi32(a.v, b.v)}; }
inline I32 max(I32 a, I32 b) { return {_mm256_max_epi32(a.v, b.v)}; }
inline I32 both(I32 a, I32 b) { return {_mm256_and_si256(a.v, b.v)}; }
inline I32 either(I32 a, I32 b) { return {_mm256_or_si256(a.v, b.v)}; }
inline I32 exclusive_or(I32 a, I32 b) { return {_mm256_xor_si256(a.v, b.v)}; }
inline I32 mul_low(I32 a, I32 b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
inline I32 load_words(const void* source) { return {_mm256_loadu_si256(static_cast<const __m256i*>(source))}; }
inline void store_words(void* out, I32 words) { _mm256_storeu_si256(static_cast<__m256i*>(out), words.v); }

template <int N>
inline I32 shift_left(I32 a) {
    return {_mm256_slli_epi32(a.v, N)};
}

template <int N>
inline I32 shift_right(I32 a) {
    return {_mm256_srli_epi32(a.v, N)};
}

inline I32 where_above(I32 a, std::int32_t limit, std::int32_t value) {
    return {_mm256_and_si256(_mm256_cmpgt_epi32(a.v, _mm256_set1_epi32(limit)), _mm256_set1_epi32(value))};
}

inline I32 join_sign(I32 a, I32 b) {
    return {_mm256_or_si256(_mm256_and_si256(a.v, _mm256_set1_epi32(0x7f)), _mm256_and_si256(b.v, _mm256_set1_epi32(0x80)))};
}

inline void store(float* out, F32 value) { _mm256_storeu_ps(out, value.v); }

inline void store(bf16* out, F32 value) {
    const __m256i raw = _mm256_castps_si256(value.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(raw, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(raw, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(raw, 16), _mm256_set1_epi32(0x40));
    const __m256 is_nan = _mm256_cmp_ps(value.v, value.v, _CMP_UNORD_Q);
    const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(chosen, chosen), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
}

inline void store(f16* out, F32 value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(value.v, _MM_FROUND_TO_NEAREST_INT));
}

inline I32 load_bytes(const std::uint8_t* source) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)))};
}

inline void store_bytes(std::uint8_t* out, const I32 (&codes)[4]) {
    const __m256i low = _mm256_packus_epi32(codes[0].v, codes[1].v);
    const __m256i high = _mm256_packus_epi32(codes[2].v, codes[3].v);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // the packs work in 128-bit halves
    const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), packed);
}

struct Bytes {
    __m256i v;
};

inline Bytes join_signs(const I32 (&codes)[4], const F32 (&signs)[4]) {
    const __m256i seven = _mm256_set1_epi32(0x7f);
    const auto pack = [](__m256i a, __m256i b) { return _mm256_packs_epi32(a, b); };  // signs stay what they are where it saturates
    const __m256i low = pack(_mm256_and_si256(codes[0].v, seven), _mm256_and_si256(codes[1].v, seven));
    const __m256i high = pack(_mm256_and_si256(codes[2].v, seven), _mm256_and_si256(codes[3].v, seven));
    const __m256i of_low = pack(bits(signs[0]).v, bits(signs[1]).v);
    const __m256i of_high = pack(bits(signs[2]).v, bits(signs[3]).v);
    const __m256i sign = _mm256_and_si256(_mm256_packs_epi16(of_low, of_high), _mm256_set1_epi8(-128));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // the packs work in 128-bit halves
    return {_mm256_permutevar8x32_epi32(_mm256_or_si256(_mm256_packs_epi16(low, high), sign), order)};
}

inline void store_bytes(std::uint8_t* out, Bytes bytes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes.v); }

inline __m256i lower_nibbles(Bytes a) {
    return _mm256_and_si256(_mm256_or_si256(a.v, _mm256_srli_epi16(a.v, 4)), _mm256_set1_epi8(0x0f));
}

inline Bytes join_nibbles(Bytes lower, Bytes upper) {
    const __m256i above = _mm256_andnot_si256(_mm256_set1_epi8(0x0f), _mm256_or_si256(upper.v, _mm256_slli_epi16(upper.v, 4)));
    return {_mm256_or_si256(lower_nibbles(lower), above)};
}

inline void store_nibbles(std::uint8_t* out, Bytes codes) {
    const __m256i pairs = _mm256_maddubs_epi16(lower_nibbles(codes), _mm256_set1_epi16(0x1001));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);  // the packs work in 128-bit halves
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
}

inline std::int32_t max_lane(I32 a) {
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtsi128_si32(half);
}

/// Lane i of the result is the largest lane of x[i].
inline I32 largest_of_each(const I32 (&x)[kLanes]) {
    __m256i of_halves[2];  // a vector for four of x, with one lane for each in either half
    for (int i = 0; i < 2; ++i) {
        const I32* const of = x + 4 * i;
        const __m256i first = _mm256_max_epi32(_mm256_unpacklo_epi32(of[0].v, of[1].v), _mm256_unpackhi_epi32(of[0].v, of[1].v));
        const __m256i second = _mm256_max_epi32(_mm256_unpacklo_epi32(of[2].v, of[3].v), _mm256_unpackhi_epi32(of[2].v, of[3].v));
        of_halves[i] = _mm256_max_epi32(_mm256_unpacklo_epi64(first, second), _mm256_unpackhi_epi64(first, second));
    }
    return {_mm256_max_epi32(_mm256_permute2x128_si256(of_halves[0], of_halves[1], 0x20), _mm256_permute2x128_si256(of_halves[0], of_halves[1], 0x31))};
}

inline U16 load_halves(const void* source) { return {_mm256_loadu_si256(static_cast<const __m256i*>(source))}; }
inline void store_halves(void* out, U16 halves) { _mm256_storeu_si256(static_cast<__m256i*>(out), halves.v); }
inline void store_lower(std::uint16_t* out, I32 words) {
    const __m256i lower = _mm256_and_si256(words.v, _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lower, lower), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
}

inline U16 splat(std::uint16_t value) { return {_mm256_set1_epi16(static_cast<short>(value))}; }
inline U16 add(U16 a, U16 b) { return {_mm256_add_epi16(a.v, b.v)}; }
inline U16 sub_saturated(U16 a, U16 b) { return {_mm256_subs_epu16(a.v, b.v)}; }
inline U16 min(U16 a, U16 b) { return {_mm256_min_epi16(a.v, b.v)}; }
inline U16 max(U16 a, U16 b) { return {_mm256_max_epi16(a.v, b.v)}; }
inline U16 both(U16 a, U16 b) { return {_mm256_and_si256(a.v, b.v)}; }
inline U16 either(U16 a, U16 b) { return {_mm256_or_si256(a.v, b.v)}; }

template <int N>
inline U16 shift_right(U16 a) {
    return {_mm256_srli_epi16(a.v, N)};
}

inline bool any(U16 a) { return _mm256_testz_si256(a.v, a.v) == 0; }

inline I32 larger_of_pairs(U16 a) {
    return {_mm256_max_epi32(_mm256_slli_epi32(a.v, 16), _mm256_and_si256(a.v, _mm256_set1_epi32(static_cast<std::int32_t>(0xffff0000u))))};
}

inline void store_bytes(std::uint8_t* out, const U16 (&codes)[2]) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(codes[0].v, codes[1].v), 0xd8);  // the packs work in 128-bit halves
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), packed);
}

}  // namespace
}  // namespace fusible::simd::FUSIBLE_LEVEL
