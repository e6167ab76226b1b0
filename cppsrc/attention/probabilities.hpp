// Exponentials of scores, the random draw of dropout, and how probabilities become operands of the next product.
#pragma once

#include "attention/kernels.hpp"
#include "gemm/units.hpp"
#include "simd/random_words.hpp"

namespace fusible::attention::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;
using namespace gemm::FUSIBLE_LEVEL;

constexpr float kInfinity = __builtin_inff();

/// Factors of dropout of kLanes scores whose counters are `step` apart.
inline F32 kept(const Dropout& d, std::uint64_t counter, std::uint64_t step) {
    alignas(64) std::int32_t words[kLanes];
    alignas(64) float factors[kLanes];
    store_words(words, random_words(d.key, counter, step));
    for (int i = 0; i < kLanes; ++i) factors[i] = static_cast<std::uint32_t>(words[i]) >= d.threshold ? d.factor : 0.0f;
    return load(factors);
}

#if defined(__AVX512BF16__)

/// Row elements [at, at + kLanes), as the left operand of a product reads them along its row.
inline void store_row(std::int32_t* row, int at, F32 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<std::uint16_t*>(row) + at), (__m256i)_mm512_cvtneps_pbh(values.v));
}

/// A unit of rows, as the left operand of a product reads them down its columns.
inline void store_across(std::int32_t* out, const F32 (&rows)[kDepth]) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(rows[0].v));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(rows[1].v));
    _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

#else

inline void store_row(std::int32_t* row, int at, F32 values) { store_units(row + at, values); }
inline void store_across(std::int32_t* out, const F32 (&rows)[kDepth]) { store_units(out, rows[0]); }

#endif

inline bool is_empty(Span span) { return span.end <= span.begin; }

/// The least span that holds `count` others.
inline Span hull(const Span* spans, int count) {
    Span all{0, 0};
    for (int i = 0; i < count; ++i) {
        if (is_empty(spans[i])) continue;
        const bool first = is_empty(all);
        all.begin = first || spans[i].begin < all.begin ? spans[i].begin : all.begin;
        all.end = first || spans[i].end > all.end ? spans[i].end : all.end;
    }
    return all;
}

/// `span` in whole steps.
inline Span widen(Span span, int step) { return is_empty(span) ? Span{0, 0} : Span{span.begin / step * step, (span.end + step - 1) / step * step}; }

/// What a hidden score is set to, so that its exponential is 0 under either sign of the scale.
inline float hidden_score(float scale) { return scale < 0.0f ? kInfinity : -kInfinity; }

inline void fill(float* values, int begin, int end, float value) {
    for (int i = begin; i < end; ++i) values[i] = value;
}

}  // namespace
}  // namespace fusible::attention::FUSIBLE_LEVEL
