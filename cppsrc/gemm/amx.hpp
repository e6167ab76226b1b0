// Blocks of a product by the micro-kernel of AMX.
#pragma once

#include "gemm/amx_tiles.hpp"
#include "gemm/factors.hpp"

#if defined(__AMX_BF16__)

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Units of K of a slab of a micro-panel of B, which stays in the nearest cache while all rows of A pass, with those of A that are multiplied: 16 KiB each.
constexpr std::int64_t kSlabUnits = 128;

inline std::int64_t steps_of(std::int64_t units) { return (units + kTileUnits - 1) / kTileUnits; }

/// `units` of a micro-panel from the u-th on, which is a slab: what rows of A are multiplied with.
struct Slab {
    const std::int32_t* panel;
    std::int64_t u;
    std::int64_t units;
    const std::int32_t* last;  // PaddedUnits

    const std::int32_t* begin() const { return panel + u * kNR; }
    std::int64_t steps() const { return steps_of(units); }
};

/// What is wanted of both operands soon, fetched a few lines with each step of tiles: a farther cache takes its time, and what a step can wait for is little.
struct TilesAhead {
    static constexpr std::int64_t kLine = 16;  // units
    const std::int32_t* a;
    const std::int32_t* b;
    std::int64_t a_lines;  // a step
    std::int64_t b_lines;

    /// What so many steps of a copy of this have fetched.
    void skip(std::int64_t steps) {
        a += steps * a_lines * kLine;
        b += steps * b_lines * kLine;
    }

    void operator()() {
        for (std::int64_t i = 0; i < a_lines; ++i, a += kLine) __builtin_prefetch(a, 0, 2);
        for (std::int64_t i = 0; i < b_lines; ++i, b += kLine) __builtin_prefetch(b, 0, 2);
    }
};

/// As multiply_tiles, of `rows` rows from the r-th on, where the sum of each block is multiplied by factors: that of one while the next is summed.
template <int kDown, int kAcross, bool kOfRows>
inline void multiply_scaled_tiles(const Block& block, int r, int rows, const Slab& slab, float* sums, TilesAhead ahead) {
    constexpr int kCols = 2 * kTileRows;
    alignas(64) float of_block[2][kCols * kCols];
    const std::int64_t blocks = (slab.units + block.factor_units - 1) / block.factor_units;
    for (std::int64_t i = 0; i <= blocks; ++i) {
        const std::int64_t u = slab.u + i * block.factor_units;
        if (i < blocks) {
            const std::int64_t units = slab.u + slab.units - u < block.factor_units ? slab.u + slab.units - u : block.factor_units;
            const auto a = TileRows::in_squares(block.a + r * block.row_stride + u * kTileRows, block.row_stride);
            multiply_tiles<kDown, kAcross>(a, slab.panel + u * kNR, units, slab.last, of_block[i % 2], kCols, false, ahead);
            ahead.skip(steps_of(units));
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
inline void multiply_slab_of_tiles(const Block& block, int r, int rows, const Slab& slab, float* sums, const TilesAhead& ahead) {
    if (block.row_factors != nullptr) return multiply_scaled_tiles<kDown, kAcross, true>(block, r, rows, slab, sums, ahead);
    if (block.factor_units != 0) return multiply_scaled_tiles<kDown, kAcross, false>(block, r, rows, slab, sums, ahead);
    const auto a = TileRows::in_squares(block.a + r * block.row_stride + slab.u * kTileRows, block.row_stride);
    multiply_tiles<kDown, kAcross>(a, slab.begin(), slab.units, slab.last, sums + r * block.sums_stride, block.sums_stride, block.add_to || slab.u > 0, ahead);
}

/// A slab of rows [first, last) of a block, whole tiles or one that is not, and of the columns from the `col`-th on, a micro-panel of them. Meanwhile the
/// next panel's slab is fetched, and a part of what the rows have of the next one.
template <int kAcross>
inline void multiply_panel(const Block& block, int first, int last, std::int64_t u, std::int64_t units, int col) {
    constexpr int kDown = 2 * kTileRows;
    const int panel = col / kNR;
    const int panels = (block.cols + kNR - 1) / kNR;
    PaddedUnits padded;
    const Slab slab{block.b + panel * block.panel_stride, u, units, padded.at};
    if (units % kTileUnits != 0) padded.fill(slab.begin(), units, kAcross);

    const bool more = u + units < block.kc;
    const std::int32_t* const next_a = block.a + (u + units) * kTileRows;
    const std::int32_t* const next_b = panel + 1 < panels ? slab.begin() + block.panel_stride : block.b + (u + units) * kNR;
    const auto share = [](std::int64_t lines, std::int64_t among) { return (lines + among - 1) / among; };
    const std::int64_t a_lines = more ? share(kDown, panels) : 0;
    const std::int64_t b_lines = more || panel + 1 < panels ? share(kDown, share(last - first, kDown)) : 0;
    const auto ahead = [&](int r) {
        const std::int64_t of_a = panel / 2 * a_lines * slab.steps();  // of two tiles' rows in turn, which lie apart
        const std::int64_t of_b = (r - first) / kDown * b_lines * slab.steps();
        return TilesAhead{next_a + (r + panel % 2 * kTileRows) * block.row_stride + of_a * TilesAhead::kLine, next_b + of_b * TilesAhead::kLine, a_lines,
                          b_lines};
    };
    int r = first;
    for (; r + kDown <= last; r += kDown) multiply_slab_of_tiles<2, kAcross>(block, r, kDown, slab, block.sums + col, ahead(r));
    if (r < last) multiply_slab_of_tiles<1, kAcross>(block, r, last - r, slab, block.sums + col, ahead(r));
}

/// Slab by slab: A's stays in the second cache while all columns pass, and so do their sums.
inline void multiply_rows_of_tiles(const Block& block, int first, int last) {
    if (first == last) return;
    configure_tiles(last - first < kTileRows ? last - first : kTileRows);
    for (std::int64_t u = 0; u == 0 || u < block.kc; u += kSlabUnits) {
        const std::int64_t units = block.kc - u < kSlabUnits ? block.kc - u : kSlabUnits;
        int col = 0;
        for (; block.cols - col > kTileRows; col += kNR) multiply_panel<2>(block, first, last, u, units, col);
        if (col < block.cols) multiply_panel<1>(block, first, last, u, units, col);
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
