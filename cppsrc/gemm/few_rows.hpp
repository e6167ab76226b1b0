// Products with few rows, whose time is that of reading B once: it is decoded on the way, and never packed. codes/multiply.hpp does the same in floats.
#pragma once

#include "gemm/kernels.hpp"
#include "gemm/pack.hpp"

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

#if defined(FUSIBLE_SIMD_AVX512)
constexpr int kSumsHeld = 24;
#elif defined(FUSIBLE_SIMD_AVX2)
constexpr int kSumsHeld = 12;
#else
constexpr int kSumsHeld = 8;
#endif

/// Columns that are summed at once, so that what is read of A serves several: fewer where each is decoded to more registers.
constexpr int columns_of(int rows, int runs) {
    const int most = 8 / runs;
    return kSumsHeld / rows > most ? most : kSumsHeld / rows < 1 ? 1 : kSumsHeld / rows;
}

#define FUSIBLE_UNROLLED _Pragma("GCC unroll 16")  // so that sums stay in registers

/// KC of three rows and more. Of floats, all rows of so many elements of A stay in the first cache; of pairs in the second one, which gives them as fast
/// as they are multiplied, and long stretches of each column are read.
constexpr std::int64_t kKC = kDepth == 2 ? 8192 : 2048;

/// sums[r][c] += the products of kHeight rows and kWidth columns over the elements [first, last).
template <class S, int kHeight, int kWidth>
inline void multiply_few(const FewRows& few, std::int64_t col, std::int64_t first, std::int64_t last) {
    F32 sum[kHeight][kWidth];
    for (int r = 0; r < kHeight; ++r)
        for (int c = 0; c < kWidth; ++c) sum[r][c] = splat(0.0f);
    const S* b[kWidth];
    for (int c = 0; c < kWidth; ++c) b[c] = static_cast<const S*>(few.b) + (col + c) * few.b_stride;
    const std::int32_t* a = few.a + first / kDepth;
    std::int64_t k = first;
    constexpr int kRuns = kRunsTogether<S>;
    for (; k + kRuns * kRun <= last; k += kRuns * kRun, a += kRuns * kLanes) {
        Units columns[kWidth][kRuns];
        FUSIBLE_UNROLLED
        for (int c = 0; c < kWidth; ++c) {
            __builtin_prefetch(b[c] + 2 * kWidth * few.b_stride + k, 0, 2);  // the columns after these: a CPU does not see where they begin
            units_along(b[c] + k, columns[c]);
        }
        FUSIBLE_UNROLLED
        for (int i = 0; i < kRuns * kHeight; ++i) {
            const int r = i % kHeight;
            const Units row = load_units(a + r * few.a_stride + i / kHeight * kLanes);
            FUSIBLE_UNROLLED
            for (int c = 0; c < kWidth; ++c) sum[r][c] = dot(sum[r][c], row, columns[c][i / kHeight]);
        }
    }
    for (; k < last; k += kRun, a += kLanes) {
        for (int c = 0; c < kWidth; ++c) {
            const Units column = units_along(b[c] + k, last - k);
            for (int r = 0; r < kHeight; ++r) sum[r][c] = dot(sum[r][c], load_units(a + r * few.a_stride), column);
        }
    }
    float totals[kHeight * kWidth];
    sums_of_lanes(sum[0], totals);
    for (int r = 0; r < kHeight; ++r)
        for (int c = 0; c < kWidth; ++c) few.sums[r * few.sums_stride + col + c] += totals[r * kWidth + c];
}

template <class S, int kHeight>
void multiply_rows(const FewRows& few) {
    constexpr int kWidth = columns_of(kHeight, kRunsTogether<S>);
    for (int r = 0; r < kHeight; ++r)
        for (std::int64_t c = 0; c < few.cols; ++c) few.sums[r * few.sums_stride + c] = 0.0f;
    const std::int64_t kc = kHeight <= 2 ? few.k : kKC;
    for (std::int64_t first = 0; first < few.k; first += kc) {
        const std::int64_t last = first + kc < few.k ? first + kc : few.k;
        std::int64_t col = 0;
        for (; col + kWidth <= few.cols; col += kWidth) multiply_few<S, kHeight, kWidth>(few, col, first, last);
        for (; col < few.cols; ++col) multiply_few<S, kHeight, 1>(few, col, first, last);
    }
}

template <class S, int kHeight = kFewRows>
void multiply_few_rows(const FewRows& few) {
    if (few.rows == kHeight) return multiply_rows<S, kHeight>(few);
    if constexpr (kHeight > 1) multiply_few_rows<S, kHeight - 1>(few);
}

#undef FUSIBLE_UNROLLED

}  // namespace
}  // namespace fusible::gemm::FUSIBLE_LEVEL
