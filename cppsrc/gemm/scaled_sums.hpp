// Products in which the sum of the products of each block of K is scaled, by vectors: a tile keeps in registers its sums and those of the block that it is
// at, and so is half as large as one without scales (tile.hpp), and so is a micro-panel of B.
#pragma once

#include "gemm/coded_rows.hpp"
#include "gemm/factors.hpp"
#include "gemm/pack.hpp"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)  // tiles do it elsewhere (amx.hpp), and floats are packed with their scales

#define FUSIBLE_GEMM_SCALES_SUMS 1

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Vectors of a tile, and columns of a micro-panel.
constexpr int kScaledVectors = 2;
constexpr int kScaledCols = kScaledVectors * kLanes;

/// Units of K of a part of a micro-panel that stays in the nearest cache while all rows pass: 16 KiB.
constexpr std::int64_t kScaledSlab = 128;

/// pack_turned and pack_coded_turned of such a micro-panel.
template <class S>
void pack_narrow(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t depth, std::int32_t* out) {
    turn_rows<kScaledVectors>(Rows<S>{static_cast<const S*>(source), stride}, rows, depth, out);
}

template <class Reader>
void pack_coded_narrow(const CodedRows& source, std::int64_t rows, std::int64_t depth, std::int32_t* out) {
    turn_rows<kScaledVectors>(Reader{source}, rows, depth, out);
}

/// Products of units of bf16, as they are added up within a block. Others (integers.hpp) have the same names.
struct DotsOfBf16 {
    using Sum = F32;

    static constexpr int kBlockUnits = cast::kScaledBlock / kDepth;

    /// What sums begin with; others have it in rows behind the factors, one for each block.
    static Sum begin(const std::int32_t*) { return splat(0.0f); }
    static Sum dot(Sum sum, Units a, Units b) { return gemm::FUSIBLE_LEVEL::dot(sum, a, b); }
    static F32 total(Sum sum) { return sum; }
};

/// Blocks [first, last) of a micro-panel at `panel`, and where the sums of its columns begin.
struct ScaledSlab {
    const Block& block;
    const std::int32_t* panel;
    std::int64_t first;
    std::int64_t last;
    float* sums;

    static constexpr int count(std::int64_t units, int of_block) { return static_cast<int>((units + of_block - 1) / of_block); }
};

/// The sums of kHeight rows from the r-th on and of kWidth vectors (+)= a slab's part of them.
template <class Dots, bool kOfRows, int kWidth, int kHeight>
inline void multiply_scaled_tile(const ScaledSlab& slab, int r) {
    const Block& block = slab.block;
    float* const sums = slab.sums + r * block.sums_stride;
    const bool add_to = block.add_to || slab.first > 0;
    F32 sum[kHeight][kWidth];
    for (int j = 0; j < kHeight; ++j)
        for (int v = 0; v < kWidth; ++v) sum[j][v] = add_to ? load(sums + j * block.sums_stride + v * kLanes) : splat(0.0f);
    const std::int32_t* a = block.a + r * block.row_stride + slab.first * Dots::kBlockUnits * block.unit_stride;
    const std::int32_t* b = slab.panel + slab.first * Dots::kBlockUnits * kScaledCols;
    const std::int32_t* const begins = slab.panel + (block.kc + ScaledSlab::count(block.kc, Dots::kBlockUnits)) * kScaledCols;
    for (std::int64_t i = slab.first; i < slab.last; ++i) {
        typename Dots::Sum of_block[kHeight][kWidth];
        for (int v = 0; v < kWidth; ++v)
            for (int j = 0; j < kHeight; ++j) of_block[j][v] = Dots::begin(begins + i * kScaledCols + v * kLanes);
        const auto add_unit = [&] {
            Units columns[kWidth];
            for (int v = 0; v < kWidth; ++v) columns[v] = load_units(b + v * kLanes);
            for (int j = 0; j < kHeight; ++j) {
                const Units row = splat_unit(a + j * block.row_stride);
                for (int v = 0; v < kWidth; ++v) of_block[j][v] = Dots::dot(of_block[j][v], row, columns[v]);
            }
            a += block.unit_stride;
            b += kScaledCols;
        };
        const std::int64_t left = block.kc - i * Dots::kBlockUnits;
        if (left >= Dots::kBlockUnits)
            for (int u = 0; u < Dots::kBlockUnits; ++u) add_unit();
        else
            for (std::int64_t u = 0; u < left; ++u) add_unit();
        const auto factors = SumFactors<kOfRows>::at(block, slab.panel, kScaledCols, i, r);
        for (int j = 0; j < kHeight; ++j)
            for (int v = 0; v < kWidth; ++v) sum[j][v] = factors.added(sum[j][v], Dots::total(of_block[j][v]), j, v * kLanes);
    }
    for (int j = 0; j < kHeight; ++j)
        for (int v = 0; v < kWidth; ++v) store(sums + j * block.sums_stride + v * kLanes, sum[j][v]);
}

/// `height` rows, at most kHeight, as multiply_scaled_tile.
template <class Dots, bool kOfRows, int kWidth, int kHeight = kMR>
inline void multiply_last_scaled(int height, const ScaledSlab& slab, int r) {
    if (height == kHeight) return multiply_scaled_tile<Dots, kOfRows, kWidth, kHeight>(slab, r);
    if constexpr (kHeight > 1) multiply_last_scaled<Dots, kOfRows, kWidth, kHeight - 1>(height, slab, r);
}

template <class Dots, bool kOfRows, int kWidth>
void multiply_scaled_panel(const Block& block, const std::int32_t* panel, float* sums) {
    constexpr int kStep = kScaledSlab / Dots::kBlockUnits;
    const int blocks = ScaledSlab::count(block.kc, Dots::kBlockUnits);
    for (int first = 0; first == 0 || first < blocks; first += kStep) {
        const ScaledSlab slab{block, panel, first, blocks - first < kStep ? blocks : first + kStep, sums};
        for (int r = 0; r < block.rows; r += kMR)
            multiply_last_scaled<Dots, kOfRows, kWidth>(block.rows - r < kMR ? block.rows - r : kMR, slab, r);
    }
}

template <class Dots, bool kOfRows>
void multiply_scaled_panels(const Block& block) {
    const std::int32_t* panel = block.b;
    for (int c = 0; c < block.cols; c += kScaledCols, panel += block.panel_stride)
        block.cols - c > kLanes ? multiply_scaled_panel<Dots, kOfRows, kScaledVectors>(block, panel, block.sums + c)
                                : multiply_scaled_panel<Dots, kOfRows, 1>(block, panel, block.sums + c);
}

/// As `multiply`, of a block with factors.
template <class Dots>
void multiply_scaled(const Block& block) {
    block.row_factors != nullptr ? multiply_scaled_panels<Dots, true>(block) : multiply_scaled_panels<Dots, false>(block);
}

}  // namespace
}  // namespace fusible::gemm::FUSIBLE_LEVEL

#endif
