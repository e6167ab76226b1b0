// Blocks of a product by the micro-kernel of AMX.
#pragma once

#include "gemm/amx_tiles.hpp"
#include "gemm/factors.hpp"

#if defined(__AMX_BF16__)

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Units of K of a slab of two micro-panels of B, which stays in the nearest cache while all rows of A pass: 32 KiB.
constexpr std::int64_t kSlabUnits = 128;

/// `units` of a micro-panel from the u-th on, which is a slab: what rows of A are multiplied with.
struct Slab {
    const std::int32_t* panel;
    std::int64_t u;
    std::int64_t units;
    const std::int32_t* last;  // PaddedUnits
};

/// As multiply_tiles, of `rows` rows from the r-th on, where the sum of each block is multiplied by factors: that of one while the next is summed.
template <int kDown, int kAcross, bool kOfRows>
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
        const auto factors = SumFactors<kOfRows>::at(block, slab.panel, kNR, u / block.factor_units - 1, r);
        const bool add_to = block.add_to || u > block.factor_units;
        for (int row = 0; row < rows; ++row)
            for (int v = 0; v < kAcross; ++v) {
                float* const at = sums + (r + row) * block.sums_stride + v * kLanes;
                const F32 sum = load(of_block[(i - 1) % 2] + row * kCols + v * kLanes);
                store(at, factors.added(add_to ? load(at) : splat(0.0f), sum, row, v * kLanes));
            }
    }
}

/// A slab's part of the sums of `rows` rows from the r-th on, 32 of them or at most 16.
template <int kDown, int kAcross>
inline void multiply_slab_of_tiles(const Block& block, int r, int rows, const Slab& slab, float* sums) {
    if (block.row_factors != nullptr) return multiply_scaled_tiles<kDown, kAcross, true>(block, r, rows, slab, sums);
    if (block.factor_units != 0) return multiply_scaled_tiles<kDown, kAcross, false>(block, r, rows, slab, sums);
    const auto a = TileRows::in_squares(block.a + r * block.row_stride + slab.u * kTileRows, block.row_stride);
    multiply_tiles<kDown, kAcross>(a, slab.panel + slab.u * kNR, slab.units, slab.last, sums + r * block.sums_stride, block.sums_stride,
                                   block.add_to || slab.u > 0);
}

/// Rows [first, last) of a block, whole tiles or one that is not, and the columns of kPanels micro-panels: a row's tiles are read from farther caches
/// once for all of these.
template <int kPanels, int kAcross>
inline void multiply_panels(const Block& block, int first, int last, const std::int32_t* panels, float* sums) {
    PaddedUnits padded[kPanels];
    Slab slabs[kPanels];
    for (std::int64_t u = 0; u == 0 || u < block.kc; u += kSlabUnits) {
        const std::int64_t units = block.kc - u < kSlabUnits ? block.kc - u : kSlabUnits;
        for (int p = 0; p < kPanels; ++p) {
            slabs[p] = {panels + p * block.panel_stride, u, units, padded[p].at};
            if (units % kTileUnits != 0) padded[p].fill(slabs[p].panel + u * kNR, units, kAcross);
        }
        int r = first;
        for (; r + 2 * kTileRows <= last; r += 2 * kTileRows)
            for (int p = 0; p < kPanels; ++p) multiply_slab_of_tiles<2, kAcross>(block, r, 2 * kTileRows, slabs[p], sums + p * kNR);
        for (int p = 0; p < kPanels && r < last; ++p) multiply_slab_of_tiles<1, kAcross>(block, r, last - r, slabs[p], sums + p * kNR);
    }
}

inline void multiply_rows_of_tiles(const Block& block, int first, int last) {
    if (first == last) return;
    configure_tiles(last - first < kTileRows ? last - first : kTileRows);
    const std::int32_t* panel = block.b;
    int c = 0;
    for (; block.cols - c > kNR + kTileRows; c += 2 * kNR, panel += 2 * block.panel_stride)
        multiply_panels<2, 2>(block, first, last, panel, block.sums + c);
    for (; block.cols - c > kTileRows; c += kNR, panel += block.panel_stride) multiply_panels<1, 2>(block, first, last, panel, block.sums + c);
    if (c < block.cols) multiply_panels<1, 1>(block, first, last, panel, block.sums + c);
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
