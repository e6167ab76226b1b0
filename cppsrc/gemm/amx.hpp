// Blocks of a product by the micro-kernel of AMX.
#pragma once

#include "gemm/amx_tiles.hpp"
#include "gemm/factors.hpp"

#if defined(__AMX_BF16__)

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Units of K of a slab of B's columns, which stays in the nearest cache while all rows of A pass: 32 KiB.
constexpr std::int64_t kSlabUnits = 256;

/// `units` of a micro-panel from the u-th on, which is a slab: what rows of A are multiplied with.
struct Slab {
    const std::int32_t* panel;
    std::int64_t u;
    std::int64_t units;
    const std::int32_t* last;  // PaddedUnits
};

/// As multiply_tiles, of `rows` rows from the r-th on, where the sum of each block is multiplied by a factor: that of one while the next is summed.
template <int kDown, int kAcross>
inline void multiply_scaled_tiles(const Block& block, int r, int rows, const Slab& slab, float* sums) {
    constexpr int kCols = 2 * kTileRows;
    alignas(64) float of_block[2][kCols * kCols];
    const std::int64_t blocks = (slab.units + block.factor_units - 1) / block.factor_units;
    for (std::int64_t i = 0; i <= blocks; ++i) {
        const std::int64_t u = slab.u + i * block.factor_units;
        if (i < blocks) {
            const std::int64_t units = slab.u + slab.units - u < block.factor_units ? slab.u + slab.units - u : block.factor_units;
            const auto a = TileRows::in_squares(block.a + r * block.row_stride + u * kTileRows, block.row_stride);
            multiply_tiles<kDown, kAcross>(a, slab.panel + u * kNR, units, slab.last, of_block[i % 2], kCols, false);
        }
        if (i == 0) continue;
        const float* const factors = factors_at(block, slab.panel, u - block.factor_units);
        const bool add_to = block.add_to || u > block.factor_units;
        for (int row = 0; row < rows; ++row)
            for (int v = 0; v < kAcross; ++v) {
                float* const at = sums + (r + row) * block.sums_stride + v * kLanes;
                store(at, joined(load(of_block[(i - 1) % 2] + row * kCols + v * kLanes), at, add_to, factors + v * kLanes));
            }
    }
}

/// A slab's part of the sums of `rows` rows from the r-th on, 32 of them or at most 16.
template <int kDown, int kAcross>
inline void multiply_slab_of_tiles(const Block& block, int r, int rows, const Slab& slab, float* sums) {
    if (block.factor_units != 0) return multiply_scaled_tiles<kDown, kAcross>(block, r, rows, slab, sums);
    const auto a = TileRows::in_squares(block.a + r * block.row_stride + slab.u * kTileRows, block.row_stride);
    multiply_tiles<kDown, kAcross>(a, slab.panel + slab.u * kNR, slab.units, slab.last, sums + r * block.sums_stride, block.sums_stride,
                                   block.add_to || slab.u > 0);
}

/// Rows [first, last) of a block, whole tiles or one that is not, and all of its columns.
template <int kAcross>
inline void multiply_columns(const Block& block, int first, int last, const std::int32_t* panel, float* sums) {
    PaddedUnits padded;
    for (std::int64_t u = 0; u == 0 || u < block.kc; u += kSlabUnits) {
        const Slab slab{panel, u, block.kc - u < kSlabUnits ? block.kc - u : kSlabUnits, padded.at};
        if (slab.units % kTileUnits != 0) padded.fill(panel + u * kNR, slab.units, kAcross);
        int r = first;
        for (; r + 2 * kTileRows <= last; r += 2 * kTileRows) multiply_slab_of_tiles<2, kAcross>(block, r, 2 * kTileRows, slab, sums);
        if (r < last) multiply_slab_of_tiles<1, kAcross>(block, r, last - r, slab, sums);
    }
}

inline void multiply_rows_of_tiles(const Block& block, int first, int last) {
    if (first == last) return;
    configure_tiles(last - first < kTileRows ? last - first : kTileRows);
    for (int c = 0; c < block.cols; c += kNR) {
        const std::int32_t* const b = block.b + c / kNR * block.panel_stride;
        if (block.cols - c > 16)
            multiply_columns<2>(block, first, last, b, block.sums + c);
        else
            multiply_columns<1>(block, first, last, b, block.sums + c);
    }
    _tile_release();
}

/// As `multiply`: A lies in tiles (pack_tiles).
void multiply_by_tiles(const Block& block) {
    const int whole = block.rows / kTileRows * kTileRows;
    multiply_rows_of_tiles(block, 0, whole);
    multiply_rows_of_tiles(block, whole, block.rows);
}

}  // namespace
}  // namespace fusible::gemm::FUSIBLE_LEVEL

#endif
