// Products with few rows, whose time is that of reading the right operand once: it is decoded on the way, and never packed.
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

/// Columns that are summed at once, so that what is read of the left operand serves several.
constexpr int columns_of(int rows) { return kSumsHeld / rows > 8 ? 8 : kSumsHeld / rows < 1 ? 1 : kSumsHeld / rows; }

/// Elements of the contracted dimension that are summed at once: of the left operand, all rows of them stay in the first cache.
constexpr std::int64_t kPart = 2048;

/// sums[r][c] += the products of kHeight rows and kWidth columns over the elements [first, last).
template <class S, int kHeight, int kWidth>
inline void multiply_few(const FewRows& few, std::int64_t col, std::int64_t first, std::int64_t last) {
    F32 sum[kHeight][kWidth];
    for (int r = 0; r < kHeight; ++r)
        for (int c = 0; c < kWidth; ++c) sum[r][c] = splat(0.0f);
    const S* right[kWidth];
    for (int c = 0; c < kWidth; ++c) right[c] = static_cast<const S*>(few.right) + (col + c) * few.right_stride;
    const std::int32_t* left = few.left + first / kDepth;
    std::int64_t k = first;
    for (; k + kRun <= last; k += kRun, left += kLanes) {
        Units columns[kWidth];
        for (int c = 0; c < kWidth; ++c) {
            __builtin_prefetch(right[c] + kWidth * few.right_stride + k);  // the columns after these: a CPU does not see where they begin
            columns[c] = units_along(right[c] + k);
        }
        for (int r = 0; r < kHeight; ++r) {
            const Units row = load_units(left + r * few.left_stride);
            for (int c = 0; c < kWidth; ++c) sum[r][c] = dot(sum[r][c], row, columns[c]);
        }
    }
    if (k < last) {
        for (int c = 0; c < kWidth; ++c) {
            const Units column = units_along(right[c] + k, last - k);
            for (int r = 0; r < kHeight; ++r) sum[r][c] = dot(sum[r][c], load_units(left + r * few.left_stride), column);
        }
    }
    for (int r = 0; r < kHeight; ++r)
        for (int c = 0; c < kWidth; ++c) few.sums[r * few.sums_stride + col + c] += sum_lanes(sum[r][c]);
}

template <class S, int kHeight>
void multiply_rows(const FewRows& few) {
    constexpr int kWidth = columns_of(kHeight);
    for (int r = 0; r < kHeight; ++r)
        for (std::int64_t c = 0; c < few.cols; ++c) few.sums[r * few.sums_stride + c] = 0.0f;
    const std::int64_t part = kHeight <= 2 ? few.depth : kPart;
    for (std::int64_t first = 0; first < few.depth; first += part) {
        const std::int64_t last = first + part < few.depth ? first + part : few.depth;
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

}  // namespace
}  // namespace fusible::gemm::FUSIBLE_LEVEL
