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

    void operator()() {
        for (std::int64_t i = 0; i < a_lines; ++i, a += kLine) __builtin_prefetch(a, 0, 2);
        for (std::int64_t i = 0; i < b_lines; ++i, b += kLine) __builtin_prefetch(b, 0, 2);
    }
};

/// Sums of blocks on their way: those of one are multiplied by their factors and added to C row by row, between the steps of the next one's tiles, which
/// leave the rest of a core idle.
template <int kAcross, bool kOfRows>
class ScaledSums {
    static constexpr int kCols = 2 * kTileRows;

  public:
    /// Where the sums of the next block go: `stride()` apart.
    float* next() { return of_block_[turn_ ^ 1]; }
    static constexpr std::int64_t stride() { return kCols; }

    /// The next block's are there: of `rows` rows, to be added to what is at `to`.
    void take(int rows, const SumFactors<kOfRows>& factors, float* to, std::ptrdiff_t to_stride, bool add_to) {
        turn_ ^= 1;
        row_ = 0;
        rows_ = rows;
        factors_ = factors;
        to_ = to;
        to_stride_ = to_stride;
        add_to_ = add_to;
    }

    int left() const { return rows_ - row_; }

    /// Adds the next `count` rows, or as many as there are.
    void add(int count) {
        if (left() == 0) return;
        const int end = count < left() ? row_ + count : rows_;
        add_to_ ? add_until<true>(end) : add_until<false>(end);
        row_ = end;
    }

    /// Adds those that are left.
    void finish() { add(left()); }

  private:
    template <bool kAddTo>
    void add_until(int end) {
        const SumFactors<kOfRows> factors = factors_;
        const std::ptrdiff_t stride = to_stride_;
        const float* sums = of_block_[turn_] + row_ * kCols;
        float* to = to_ + row_ * stride;
        F32 columns[kAcross];
        for (int v = 0; v < kAcross; ++v) columns[v] = load(factors.columns + v * kLanes);
        for (int row = row_; row < end; ++row, sums += kCols, to += stride)
            for (int v = 0; v < kAcross; ++v) {
                const F32 factor = kOfRows ? mul(columns[v], splat(factors.rows[row])) : columns[v];
                store(to + v * kLanes, fma(load(sums + v * kLanes), factor, kAddTo ? load(to + v * kLanes) : splat(0.0f)));
            }
    }

    alignas(64) float of_block_[2][kCols * kCols];
    SumFactors<kOfRows> factors_{};
    float* to_ = nullptr;
    std::ptrdiff_t to_stride_ = 0;
    int turn_ = 0;
    int row_ = 0;
    int rows_ = 0;
    bool add_to_ = false;
};

/// What stands in its place where sums are not scaled.
struct PlainSums {
    void finish() {}
};

/// A slab's part of the sums of `rows` rows from the r-th on, at most kDown tiles of them.
template <int kDown, int kAcross>
inline void multiply_slab_of_tiles(const Block& block, int r, int, const Slab& slab, float* sums, const TilesAhead& ahead, PlainSums&) {
    const auto a = TileRows::in_squares(block.a + r * block.row_stride + slab.u * kTileRows, block.row_stride);
    multiply_tiles<kDown, kAcross>(a, slab.begin(), slab.units, slab.last, sums + r * block.sums_stride, block.sums_stride, block.add_to || slab.u > 0, ahead);
}

/// The same where the sum of each block of K is multiplied by factors.
template <int kDown, int kAcross, bool kOfRows>
inline void multiply_slab_of_tiles(const Block& block, int r, int rows, const Slab& slab, float* sums, TilesAhead ahead, ScaledSums<kAcross, kOfRows>& scaled) {
    for (std::int64_t u = slab.u; u == slab.u || u < slab.u + slab.units; u += block.factor_units) {
        const std::int64_t units = slab.u + slab.units - u < block.factor_units ? slab.u + slab.units - u : block.factor_units;
        const auto a = TileRows::in_squares(block.a + r * block.row_stride + u * kTileRows, block.row_stride);
        const int steps = static_cast<int>(steps_of(units));
        const int rows_a_step = steps > 0 ? (scaled.left() + steps - 1) / steps : 0;
        const auto meanwhile = [&] {
            ahead();
            scaled.add(rows_a_step);
        };
        multiply_tiles<kDown, kAcross>(a, slab.panel + u * kNR, units, slab.last, scaled.next(), scaled.stride(), false, meanwhile);
        scaled.finish();
        const auto factors = SumFactors<kOfRows>::at(block, slab.panel, kNR, u / block.factor_units, r);
        scaled.take(rows, factors, sums + r * block.sums_stride, block.sums_stride, block.add_to || u > 0);
    }
}

/// A slab of the rows of a block, and of its columns from the `col`-th on, a micro-panel of them. Meanwhile the next panel's slab is fetched, and a part of
/// what the rows have of the next one.
template <int kAcross, class Sums>
inline void multiply_panel(const Block& block, std::int64_t u, std::int64_t units, int col) {
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
    const std::int64_t b_lines = more || panel + 1 < panels ? share(kDown, share(block.rows, kDown)) : 0;
    const auto ahead = [&](int r) {
        const std::int64_t of_a = panel / 2 * a_lines * slab.steps();  // of two tiles' rows in turn, which lie apart
        const std::int64_t of_b = r / kDown * b_lines * slab.steps();
        return TilesAhead{next_a + (r + panel % 2 * kTileRows) * block.row_stride + of_a * TilesAhead::kLine, next_b + of_b * TilesAhead::kLine, a_lines,
                          b_lines};
    };
    Sums sums;
    int r = 0;
    for (; block.rows - r > kTileRows; r += kDown)
        multiply_slab_of_tiles<2, kAcross>(block, r, block.rows - r < kDown ? block.rows - r : kDown, slab, block.sums + col, ahead(r), sums);
    if (r < block.rows) multiply_slab_of_tiles<1, kAcross>(block, r, block.rows - r, slab, block.sums + col, ahead(r), sums);
    sums.finish();
}

/// The same, by what becomes of the sums.
template <int kAcross>
inline void multiply_panel(const Block& block, std::int64_t u, std::int64_t units, int col) {
    if (block.row_factors != nullptr) return multiply_panel<kAcross, ScaledSums<kAcross, true>>(block, u, units, col);
    if (block.factor_units != 0) return multiply_panel<kAcross, ScaledSums<kAcross, false>>(block, u, units, col);
    multiply_panel<kAcross, PlainSums>(block, u, units, col);
}

/// As `multiply`: A lies in tiles (pack_tiles), and there are sums for whole ones. Slab by slab: A's stays in the second cache while all columns pass, and
/// so do their sums.
void multiply_by_tiles(const Block& block) {
    configure_tiles();
    for (std::int64_t u = 0; u == 0 || u < block.kc; u += kSlabUnits) {
        const std::int64_t units = block.kc - u < kSlabUnits ? block.kc - u : kSlabUnits;
        int col = 0;
        for (; block.cols - col > kTileRows; col += kNR) multiply_panel<2>(block, u, units, col);
        if (col < block.cols) multiply_panel<1>(block, u, units, col);
    }
    _tile_release();
}

}  // namespace
}  // namespace fusible::gemm::FUSIBLE_LEVEL

#endif
