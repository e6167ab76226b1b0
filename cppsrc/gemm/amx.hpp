// The micro-kernel of AMX: a register is a tile, of 16 rows of 64 bytes. A product of two tiles adds to 16 x 16 sums what 16 rows of A and 16 columns
// of B make of 32 elements of K. Of the eight tiles four hold sums, two A and two B.
#pragma once

#include "gemm/factors.hpp"
#include "gemm/tile.hpp"

#if defined(__AMX_BF16__)

#include <immintrin.h>

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr int kTileRows = 16;
constexpr std::int64_t kTileUnits = 16;
/// Units of K of a slab of B's columns, which stays in the nearest cache while all rows of A pass: 32 KiB.
constexpr std::int64_t kSlabUnits = 256;

/// What the tiles are, until they are released: `rows` of the first sums and of the first A, 16 of all others.
inline void configure_tiles(int rows) {
    struct alignas(64) {
        std::uint8_t palette = 1;
        std::uint8_t first_row = 0;
        std::uint8_t reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
    } configuration;
    constexpr int kOfRows[] = {0, 1, 4};
    for (const int tile : kOfRows) configuration.rows[tile] = static_cast<std::uint8_t>(rows);
    _tile_loadconfig(&configuration);
}

/// Sums of kDown x kAcross tiles: (+)= the product of `units` (whole tiles, but for the last, which `b_last` has padded with zeros).
template <int kDown, int kAcross>
inline void multiply_tiles(const std::int32_t* a, std::int64_t a_stride, const std::int32_t* b, std::int64_t units, const std::int32_t* b_last,
                           float* sums, std::int64_t stride, bool add_to) {
    constexpr std::int64_t kABytes = kTileUnits * 4;
    const std::int64_t c_bytes = stride * 4;
    constexpr std::int64_t kBBytes = kNR * 4;
    const std::int32_t* const a_below = a + kTileRows * a_stride;
    float* const sums_below = sums + kTileRows * stride;
    if (add_to) {
        _tile_loadd(0, sums, c_bytes);
        if constexpr (kAcross > 1) _tile_loadd(1, sums + 16, c_bytes);
        if constexpr (kDown > 1) _tile_loadd(2, sums_below, c_bytes);
        if constexpr (kDown > 1 && kAcross > 1) _tile_loadd(3, sums_below + 16, c_bytes);
    } else {
        _tile_zero(0);
        if constexpr (kAcross > 1) _tile_zero(1);
        if constexpr (kDown > 1) _tile_zero(2);
        if constexpr (kDown > 1 && kAcross > 1) _tile_zero(3);
    }
    for (std::int64_t u = 0; u < units; u += kTileUnits) {
        const bool last = units - u < kTileUnits;
        const std::int32_t* const from = last ? b_last : b + u * kNR;
        _tile_loadd(6, from, kBBytes);
        if constexpr (kAcross > 1) _tile_loadd(7, from + 16, kBBytes);
        _tile_loadd(4, a + u * kTileRows, kABytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (kAcross > 1) _tile_dpbf16ps(1, 4, 7);
        if constexpr (kDown > 1) {
            _tile_loadd(5, a_below + u * kTileRows, kABytes);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (kAcross > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, c_bytes);
    if constexpr (kAcross > 1) _tile_stored(1, sums + 16, c_bytes);
    if constexpr (kDown > 1) _tile_stored(2, sums_below, c_bytes);
    if constexpr (kDown > 1 && kAcross > 1) _tile_stored(3, sums_below + 16, c_bytes);
}

/// The last units of a slab's columns, with zeros for those that a tile has more.
struct PaddedUnits {
    alignas(64) std::int32_t at[kTileUnits * kNR];

    void fill(const std::int32_t* b, std::int64_t units, int across) {
        const std::int64_t whole = units / kTileUnits * kTileUnits;
        for (std::int64_t u = 0; u < kTileUnits; ++u)
            for (int v = 0; v < across; ++v)
                _mm512_store_si512(at + u * kNR + v * 16, whole + u < units ? _mm512_loadu_si512(b + (whole + u) * kNR + v * 16) : _mm512_setzero_si512());
    }
};

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
            const std::int32_t* const a = block.a + r * block.row_stride + u * kTileRows;
            multiply_tiles<kDown, kAcross>(a, block.row_stride, slab.panel + u * kNR, units, slab.last, of_block[i % 2], kCols, false);
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
    const std::int32_t* const a = block.a + r * block.row_stride + slab.u * kTileRows;
    multiply_tiles<kDown, kAcross>(a, block.row_stride, slab.panel + slab.u * kNR, slab.units, slab.last, sums + r * block.sums_stride, block.sums_stride,
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
