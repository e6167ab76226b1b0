// The micro-kernel of AMX: a register is a tile, of 16 rows of 64 bytes. A product of two tiles adds to 16 x 16 sums what 16 rows of A and 16 columns
// of B make of 32 elements of K. Of the eight tiles four hold sums, two A and two B.
#pragma once

#include "gemm/tile.hpp"

#if defined(__AMX_BF16__)

#include <immintrin.h>

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr int kTileRows = 16;
constexpr std::int64_t kTileUnits = 16;

/// What the tiles are, until they are released.
inline void configure_tiles() {
    struct alignas(64) {
        std::uint8_t palette = 1;
        std::uint8_t first_row = 0;
        std::uint8_t reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
    } configuration;
    _tile_loadconfig(&configuration);
}

/// Rows of A, whole tiles of units each: in squares, one square after another along a row, or as they are.
struct TileRows {
    const std::int32_t* at;
    std::int64_t stride;      // units of a row
    std::int64_t tile_step;   // units from a tile to the next along its rows
    std::int64_t row_units;   // and within a tile from a row to the next

    static TileRows in_squares(const std::int32_t* at, std::int64_t stride) { return {at, stride, kTileRows * kTileUnits, kTileUnits}; }
    static TileRows as_rows(const std::int32_t* at, std::int64_t stride) { return {at, stride, kTileUnits, stride}; }
};

/// Sums of kDown x kAcross tiles: (+)= the product of `units` (whole tiles, but for the last, which `b_last` has padded with zeros).
template <int kDown, int kAcross, class Fetch = FetchNothing>
inline void multiply_tiles(const TileRows& rows, const std::int32_t* b, std::int64_t units, const std::int32_t* b_last, float* sums, std::int64_t stride,
                           bool add_to, Fetch fetch = {}) {
    const std::int64_t a_bytes = rows.row_units * 4;
    const std::int64_t c_bytes = stride * 4;
    constexpr std::int64_t kBBytes = kNR * 4;
    const std::int32_t* a = rows.at;
    const std::int32_t* a_below = rows.at + kTileRows * rows.stride;
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
    for (std::int64_t u = 0; u < units; u += kTileUnits, a += rows.tile_step, a_below += rows.tile_step) {
        const bool last = units - u < kTileUnits;
        const std::int32_t* const from = last ? b_last : b + u * kNR;
        fetch();
        _tile_loadd(6, from, kBBytes);
        if constexpr (kAcross > 1) _tile_loadd(7, from + 16, kBBytes);
        _tile_loadd(4, a, a_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (kAcross > 1) _tile_dpbf16ps(1, 4, 7);
        if constexpr (kDown > 1) {
            _tile_loadd(5, a_below, a_bytes);
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

}  // namespace
}  // namespace fusible::gemm::FUSIBLE_LEVEL

#endif
