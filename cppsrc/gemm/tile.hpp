// The square of results that a product keeps in registers.
#pragma once

#include "gemm/units.hpp"

namespace fusible {
namespace FUSIBLE_LEVEL {
namespace {

#if defined(FUSIBLE_SIMD_AVX512)
constexpr int kVectors = 4;
constexpr int kRows = 6;  // 24 sums, 4 vectors and 1 broadcast of 32 registers
#elif defined(FUSIBLE_SIMD_AVX2)
constexpr int kVectors = 2;
constexpr int kRows = 6;  // 12 sums, 2 vectors and 1 broadcast of 16 registers
#else
constexpr int kVectors = 1;
constexpr int kRows = 4;
#endif

/// Columns of a tile, and of a packed panel.
constexpr int kPanel = kVectors * kLanes;

/// The left operand of a block: unit u of row r lies at units[r * row_stride + u * unit_stride].
struct Left {
    const std::int32_t* units;
    std::ptrdiff_t row_stride;
    std::ptrdiff_t unit_stride;
};

/// sums[r][c] (+)= the product of kHeight rows of the left operand and a panel of the right one, over `depth` units.
template <int kHeight>
inline void multiply_tile(const Left& left, const std::int32_t* right, std::int64_t depth, float* sums, std::ptrdiff_t stride, bool add_to) {
    F32 sum[kHeight][kVectors];
    for (int r = 0; r < kHeight; ++r)
        for (int v = 0; v < kVectors; ++v) sum[r][v] = splat(0.0f);
    const std::int32_t* unit = left.units;
    for (std::int64_t u = 0; u < depth; ++u) {
        Units vectors[kVectors];
        for (int v = 0; v < kVectors; ++v) vectors[v] = load_units(right + v * kLanes);
        for (int r = 0; r < kHeight; ++r) {
            const Units factor = splat_unit(unit + r * left.row_stride);
            for (int v = 0; v < kVectors; ++v) sum[r][v] = dot(sum[r][v], factor, vectors[v]);
        }
        unit += left.unit_stride;
        right += kPanel;
    }
    // Unrolled, or the sums would go through memory on their way.
#pragma GCC unroll 16
    for (int r = 0; r < kHeight; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
            float* const at = sums + r * stride + v * kLanes;
            store(at, add_to ? add(load(at), sum[r][v]) : sum[r][v]);
        }
}

template <int kHeight = kRows>
inline void multiply_last(int height, const Left& left, const std::int32_t* right, std::int64_t depth, float* sums, std::ptrdiff_t stride,
                          bool add_to) {
    if (height == kHeight) return multiply_tile<kHeight>(left, right, depth, sums, stride, add_to);
    if constexpr (kHeight > 1) multiply_last<kHeight - 1>(height, left, right, depth, sums, stride, add_to);
}

}  // namespace
}  // namespace FUSIBLE_LEVEL
}  // namespace fusible
