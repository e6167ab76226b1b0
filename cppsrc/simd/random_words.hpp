// The random words of kLanes counters at once (runtime/random_words.hpp has the formula).
#pragma once

#include "runtime/random_words.hpp"
#include "simd/simd.hpp"

namespace fusible::simd::FUSIBLE_LEVEL {
namespace {

/// Long words of kLanes counters.
struct LongWords {
    I32 lower, upper;
};

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

inline __m512i long_words_of(__m512i y, __m512i key) {
    const __m512i word = words_of(y, key);
    const __m512i x = swapped(word);
    return _mm512_xor_si512(word, _mm512_srli_epi64(_mm512_add_epi64(squared(x), y), 32));
}

/// The products of key and the counters counter + i * step, in order.
struct CounterProducts {
    __m512i first, second, key;

    CounterProducts(std::uint64_t of_key, std::uint64_t counter, std::uint64_t step) {
        key = _mm512_set1_epi64(static_cast<std::int64_t>(of_key));
        const __m512i steps = _mm512_mullo_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi64(static_cast<std::int64_t>(step * of_key)));
        first = _mm512_add_epi64(_mm512_set1_epi64(static_cast<std::int64_t>(counter * of_key)), steps);
        second = _mm512_add_epi64(first, _mm512_set1_epi64(static_cast<std::int64_t>(8 * step * of_key)));
    }
};

inline I32 lower_halves(__m512i first, __m512i second) {
    return {_mm512_permutex2var_epi32(first, _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0), second)};
}

inline I32 upper_halves(__m512i first, __m512i second) {
    return {_mm512_permutex2var_epi32(first, _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1), second)};
}

/// Of the counters counter + i * step.
[[maybe_unused]] inline I32 random_words(std::uint64_t key, std::uint64_t counter, std::uint64_t step) {
    const CounterProducts y(key, counter, step);
    return upper_halves(words_of(y.first, y.key), words_of(y.second, y.key));
}

[[maybe_unused]] inline LongWords long_random_words(std::uint64_t key, std::uint64_t counter, std::uint64_t step) {
    const CounterProducts y(key, counter, step);
    const __m512i first = long_words_of(y.first, y.key);
    const __m512i second = long_words_of(y.second, y.key);
    return {lower_halves(first, second), upper_halves(first, second)};
}

/// Each quarter, of 16 bits and from the lowest on, of the long words of kLanes counters one after another.
[[maybe_unused]] inline void random_quarters(std::uint64_t key, std::uint64_t counter, I32 (&out)[4]) {
    const CounterProducts y(key, counter, 1);
    const __m512i words[2] = {long_words_of(y.first, y.key), long_words_of(y.second, y.key)};
    for (int i = 0; i < 2; ++i) {
        out[2 * i] = {_mm512_cvtepu16_epi32(_mm512_castsi512_si256(words[i]))};
        out[2 * i + 1] = {_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words[i], 1))};
    }
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

inline __m256i long_words_of(__m256i y, __m256i key) {
    const __m256i word = words_of(y, key);
    const __m256i x = _mm256_shuffle_epi32(word, 0xb1);
    return _mm256_xor_si256(word, _mm256_srli_epi64(_mm256_add_epi64(squared(x), y), 32));
}

/// The products of key and the counters counter + i * step, in order.
struct CounterProducts {
    __m256i first, second, key;

    CounterProducts(std::uint64_t of_key, std::uint64_t counter, std::uint64_t step) {
        const std::uint64_t y = counter * of_key;
        const std::uint64_t apart = step * of_key;
        const auto after = [&](std::uint64_t i) { return static_cast<std::int64_t>(i * apart); };
        key = _mm256_set1_epi64x(static_cast<std::int64_t>(of_key));
        first = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<std::int64_t>(y)), _mm256_set_epi64x(after(3), after(2), after(1), 0));
        second = _mm256_add_epi64(first, _mm256_set1_epi64x(after(4)));
    }
};

/// The lower (0x88) or the upper (0xdd) halves of two registers of words: of both pair by pair, then in order.
template <int kWhich>
inline I32 halves_of(__m256i first, __m256i second) {
    const __m256 pairs = _mm256_shuffle_ps(_mm256_castsi256_ps(first), _mm256_castsi256_ps(second), kWhich);
    return {_mm256_permute4x64_epi64(_mm256_castps_si256(pairs), 0xd8)};
}

[[maybe_unused]] inline I32 random_words(std::uint64_t key, std::uint64_t counter, std::uint64_t step) {
    const CounterProducts y(key, counter, step);
    return halves_of<0xdd>(words_of(y.first, y.key), words_of(y.second, y.key));
}

[[maybe_unused]] inline LongWords long_random_words(std::uint64_t key, std::uint64_t counter, std::uint64_t step) {
    const CounterProducts y(key, counter, step);
    const __m256i first = long_words_of(y.first, y.key);
    const __m256i second = long_words_of(y.second, y.key);
    return {halves_of<0x88>(first, second), halves_of<0xdd>(first, second)};
}

[[maybe_unused]] inline void random_quarters(std::uint64_t key, std::uint64_t counter, I32 (&out)[4]) {
    const CounterProducts y(key, counter, 1);
    const __m256i words[2] = {long_words_of(y.first, y.key), long_words_of(y.second, y.key)};
    for (int i = 0; i < 2; ++i) {
        out[2 * i] = {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(words[i]))};
        out[2 * i + 1] = {_mm256_cvtepu16_epi32(_mm256_extracti128_si256(words[i], 1))};
    }
}

#else

[[maybe_unused]] inline I32 random_words(std::uint64_t key, std::uint64_t counter, std::uint64_t step) {
    I32 words;
    for (int i = 0; i < kLanes; ++i) words.lane[i] = static_cast<std::int32_t>(random_word(key, counter + static_cast<std::uint64_t>(i) * step));
    return words;
}

[[maybe_unused]] inline LongWords long_random_words(std::uint64_t key, std::uint64_t counter, std::uint64_t step) {
    LongWords words;
    for (int i = 0; i < kLanes; ++i) {
        const std::uint64_t word = long_random_word(key, counter + static_cast<std::uint64_t>(i) * step);
        words.lower.lane[i] = static_cast<std::int32_t>(word & 0xffffffffu);
        words.upper.lane[i] = static_cast<std::int32_t>(word >> 32);
    }
    return words;
}

[[maybe_unused]] inline void random_quarters(std::uint64_t key, std::uint64_t counter, I32 (&out)[4]) {
    for (int i = 0; i < 4 * kLanes; ++i) {
        const std::uint64_t word = long_random_word(key, counter + static_cast<std::uint64_t>(i / 4));
        out[i / kLanes].lane[i % kLanes] = static_cast<std::int32_t>(word >> (16 * (i % 4)) & 0xffffu);
    }
}

#endif

}  // namespace
}  // namespace fusible::simd::FUSIBLE_LEVEL
