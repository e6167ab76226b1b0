// The random words of kLanes counters at once (runtime/random_words.hpp has the formula).
#pragma once

#include "runtime/random_words.hpp"
#include "simd/simd.hpp"

namespace fusible::simd::FUSIBLE_LEVEL {
namespace {

#if defined(FUSIBLE_SIMD_AVX512)

inline __m512i squared(__m512i x) { return _mm512_mullo_epi64(x, x); }

/// The halves of each 64 bits in the place of each other.
inline __m512i swapped(__m512i x) { return _mm512_shuffle_epi32(x, static_cast<_MM_PERM_ENUM>(0xb1)); }

/// Words of which the upper halves count, by the products of counters and key.
inline __m512i words_of(__m512i y, __m512i key) {
    const __m512i z = _mm512_add_epi64(y, key);
    __m512i x = swapped(_mm512_add_epi64(squared(y), y));
    x = swapped(_mm512_add_epi64(squared(x), z));
    x = swapped(_mm512_add_epi64(squared(x), y));
    return _mm512_add_epi64(squared(x), z);
}

/// Of the counters counter + i * step.
[[maybe_unused]] inline I32 random_words(std::uint64_t key, std::uint64_t counter, std::uint64_t step) {
    const __m512i each = _mm512_set1_epi64(static_cast<std::int64_t>(key));
    const __m512i steps = _mm512_mullo_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi64(static_cast<std::int64_t>(step * key)));
    const __m512i first = _mm512_add_epi64(_mm512_set1_epi64(static_cast<std::int64_t>(counter * key)), steps);
    const __m512i second = _mm512_add_epi64(first, _mm512_set1_epi64(static_cast<std::int64_t>(8 * step * key)));
    const __m512i upper = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return {_mm512_permutex2var_epi32(words_of(first, each), upper, words_of(second, each))};
}

#elif defined(FUSIBLE_SIMD_AVX2)

/// x * x modulo 2^64: (h 2^32 + l)^2 = l^2 + 2 l h 2^32.
inline __m256i squared(__m256i x) {
    const __m256i across = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
    return _mm256_add_epi64(_mm256_mul_epu32(x, x), _mm256_slli_epi64(across, 33));
}

inline __m256i words_of(__m256i y, __m256i key) {
    constexpr int kSwap = 0xb1;  // the halves of 64 bits
    const __m256i z = _mm256_add_epi64(y, key);
    __m256i x = _mm256_shuffle_epi32(_mm256_add_epi64(squared(y), y), kSwap);
    x = _mm256_shuffle_epi32(_mm256_add_epi64(squared(x), z), kSwap);
    x = _mm256_shuffle_epi32(_mm256_add_epi64(squared(x), y), kSwap);
    return _mm256_add_epi64(squared(x), z);
}

[[maybe_unused]] inline I32 random_words(std::uint64_t key, std::uint64_t counter, std::uint64_t step) {
    const auto by = [&](std::uint64_t i) { return static_cast<std::int64_t>((counter + i * step) * key); };
    const __m256i each = _mm256_set1_epi64x(static_cast<std::int64_t>(key));
    const __m256i first = words_of(_mm256_set_epi64x(by(3), by(2), by(1), by(0)), each);
    const __m256i second = words_of(_mm256_set_epi64x(by(7), by(6), by(5), by(4)), each);
    const __m256 upper = _mm256_shuffle_ps(_mm256_castsi256_ps(first), _mm256_castsi256_ps(second), 0xdd);  // of both, pair by pair
    return {_mm256_permute4x64_epi64(_mm256_castps_si256(upper), 0xd8)};
}

#else

[[maybe_unused]] inline I32 random_words(std::uint64_t key, std::uint64_t counter, std::uint64_t step) {
    I32 words;
    for (int i = 0; i < kLanes; ++i) words.lane[i] = static_cast<std::int32_t>(random_word(key, counter + static_cast<std::uint64_t>(i) * step));
    return words;
}

#endif

}  // namespace
}  // namespace fusible::simd::FUSIBLE_LEVEL
