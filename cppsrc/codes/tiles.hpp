// Products with a few more rows, by AMX: 16 columns of B are decoded to tiles, which are multiplied with 16 rows of A at once, or twice as many, so that
// these cost little more than one does. A is bfloat16, and lies in tiles too (pack_tiles).
//
// Order of accumulation: elements of a block, or of a section where there is one scale or the scales are part of the values, are added up one pair after
// another, in float, with subnormal numbers taken as zero; the sum is multiplied by the factor and added to the column's, in one rounding. Sections are
// added up at the end. So a result is off by at most K roundings of the sum of the magnitudes of its products.
#pragma once

#include "codes/decoders.hpp"
#include "codes/factors.hpp"

#if defined(__AMX_BF16__)

namespace fusible::codes::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr int kTileCols = 16;      // of B
constexpr int kTileElements = 32;  // of K
constexpr int kTileHalves = kTileCols * kTileElements;

/// The compiler knows not that tiles are read from memory and written to it.
inline void tiles_touch(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// A decoder to tiles has: kElements and kTiles of a step; element(tile, place), the element of a step at a place of a tile's row; kFolds, whether the
// scales are part of the values; and decode, which writes a row of each tile.

template <class F>
struct TileDecoder8 {
    static constexpr int kElements = 64;
    static constexpr int kBytes = 64;
    static constexpr int kTiles = 2;
    static constexpr bool kFolds = false;
    static constexpr int element(int tile, int place) { return 32 * tile + place % 16 / 8 * 16 + place / 16 * 8 + place % 8; }

    /// Each tile has 32 elements that follow one another.
    static void decode(const std::uint8_t* codes, const float*, std::uint16_t* row) {
        const Halves<F> halves(codes);
        for (int i = 0; i < 2; ++i) {
            _mm256_store_si256(reinterpret_cast<__m256i*>(row + 16 * i), _mm512_castsi512_si256(halves.pairs[i]));
            _mm256_store_si256(reinterpret_cast<__m256i*>(row + kTileHalves + 16 * i), _mm512_extracti64x4_epi64(halves.pairs[i], 1));
        }
    }
};

/// A code of four bits times its scale has six bits at most, which bfloat16 holds.
struct TileDecoder4 {
    static constexpr int kElements = 128;
    static constexpr int kBytes = 64;
    static constexpr int kTiles = 4;
    static constexpr bool kFolds = true;
    static constexpr int element(int tile, int place) { return place / 2 * 8 + tile * 2 + place % 2; }

    static void decode(const std::uint8_t* source, const float* factors, std::uint16_t* row) {
        using Seen = NothingSeen;
        Seen seen;
        const Decoder4 codes(source, seen);
        const F32 factor = factors_of_lanes<Decoder4, SmallFloats::kBlock>(factors, 0);
        constexpr int kSelect = 0xe4;  // mask ? a : b, bit by bit
        for (int tile = 0; tile < kTiles; ++tile) {
            const __m512i even = _mm512_srli_epi32(bits(mul(codes.values(2 * tile), factor)).v, 16);
            const __m512i odd = bits(mul(codes.values(2 * tile + 1), factor)).v;
            _mm512_store_si512(row + tile * kTileHalves, _mm512_ternarylogic_epi32(odd, even, _mm512_set1_epi32(-65536), kSelect));
        }
    }
};

/// The bfloat16 of each code of four bits.
struct HalvesOfFours {
    alignas(32) std::uint16_t at[16] = {};

    constexpr HalvesOfFours() {
        constexpr std::uint16_t kSizes[] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};  // 0, 0.5, 1, 1.5, 2, 3, 4, 6
        for (int code = 0; code < 16; ++code) at[code] = static_cast<std::uint16_t>(kSizes[code & 7] | (code >> 3) << 15);
    }
};

/// Codes of four bits, whose powers of two multiply sums: bfloat16 would not hold all of their products.
struct TileDecoderOfFours {
    static constexpr int kElements = 64;
    static constexpr int kBytes = 32;
    static constexpr int kTiles = 2;
    static constexpr bool kFolds = false;
    static constexpr int element(int tile, int place) { return 32 * tile + place; }

    static void decode(const std::uint8_t* source, const float*, std::uint16_t* row) {
        static constexpr HalvesOfFours kHalves;
        const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(kHalves.at)));
        for (int tile = 0; tile < kTiles; ++tile) {
            const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 16 * tile)));
            const __m512i codes = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));  // each 16 bits begin with one
            _mm512_store_si512(row + tile * kTileHalves, _mm512_permutexvar_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(15)), table));
        }
    }
};

constexpr int kTileRows = 16;  // of A
static_assert(kRowsOfHalves == 2 * kTileRows, "rows of A are in one tile or in two");

/// A for a decoder: `rows` of floats that bfloat16 holds become tiles of 16 pairs of elements of up to kTileRows rows, those of the first rows before those
/// of the others.
template <class Decoder, class Factors>
void pack_tiles(const float* a, std::ptrdiff_t stride, int rows, std::int64_t count, std::uint16_t* out, std::ptrdiff_t) {
    for (int row = 0; row < rows; row += kTileRows) {
        const int end = rows - row < kTileRows ? rows : row + kTileRows;
        for (std::int64_t first = 0; first < count; first += Decoder::kElements)
            for (int tile = 0; tile < Decoder::kTiles; ++tile)
                for (int pair = 0; pair < kTileElements / 2; ++pair)
                    for (int r = row; r < end; ++r)
                        for (int i = 0; i < 2; ++i)
                            *out++ = static_cast<std::uint16_t>(
                                static_cast<std::uint32_t>(bits_of(a[r * stride + first + Decoder::element(tile, 2 * pair + i)])) >> 16);
    }
}

/// The rows of A: in each of the tiles that they are in, and where these begin.
template <int kTilesOfRows>
struct TiledRows {
    int rows[kTilesOfRows];
    const std::uint16_t* at[kTilesOfRows];

    /// All of them, of `elements` each, packed by pack_tiles; from an element on that begins a step.
    static TiledRows of(const FewHalves& few, std::int64_t element) {
        const std::int64_t elements = (few.codes.k + kMostElements - 1) / kMostElements * kMostElements;
        TiledRows all;
        for (int i = 0; i < kTilesOfRows; ++i) {
            const int left = few.codes.rows - i * kTileRows;
            all.rows[i] = left < kTileRows ? left : kTileRows;
            all.at[i] = few.a + i * kTileRows * elements + element * all.rows[i];
        }
        return all;
    }

    TiledRows after(std::int64_t elements) const {
        TiledRows next = *this;
        for (int i = 0; i < kTilesOfRows; ++i) next.at[i] += elements * rows[i];
        return next;
    }
};

/// Tiles 0 to 3 hold sums, 4 and 5 columns of B, 6 and 7 rows of A: where these are in two tiles, 2, 3 and 7 are of the second.
template <int kTilesOfRows>
inline void configure_tiles(const TiledRows<kTilesOfRows>& a) {
    struct alignas(64) {
        std::uint8_t palette = 1;
        std::uint8_t first_row = 0;
        std::uint8_t reserved[14] = {};
        std::uint16_t row_bytes[16] = {};
        std::uint8_t rows[16] = {};
    } configuration;
    for (int tile = 0; tile < 8; ++tile) {
        const bool of_last = tile == 2 || tile == 3 || tile == 7;
        configuration.rows[tile] = kTileCols;
        configuration.row_bytes[tile] = static_cast<std::uint16_t>(tile == 4 || tile == 5 ? 64 : 4 * a.rows[of_last ? kTilesOfRows - 1 : 0]);
    }
    tiles_touch(&configuration);
    _tile_loadconfig(&configuration);
}

/// Sums of the columns of a group, each a vector over the rows of A.
struct GroupSums {
    F32 of[kTileCols];

    GroupSums() {
        for (F32& sum : of) sum = splat(0.0f);
    }

    /// Adds tiles of sums times the factors of their columns: those at `at` of each.
    template <std::size_t kRoom>
    void add_scaled(const float* tile, const float (&factors)[kTileCols][kRoom], std::int64_t at) {
        for (int c = 0; c < kTileCols; ++c) of[c] = fma(load(tile + c * kLanes), splat(factors[c][at]), of[c]);
    }

    void add(const float* tile) {
        for (int c = 0; c < kTileCols; ++c) of[c] = simd::FUSIBLE_LEVEL::add(load(tile + c * kLanes), of[c]);
    }
};

/// What a group works with: tiles of B of two steps, and those of sums, two for each tile of rows.
template <class Decoder, int kTilesOfRows>
struct TileScratch {
    static constexpr int kSums = 2 * kTilesOfRows;
    alignas(64) std::uint16_t b[2][Decoder::kTiles * kTileHalves];
    alignas(64) float sums[2][kSums > Decoder::kTiles ? kSums : Decoder::kTiles][kTileCols * kLanes] = {};
};

// Tiles are named by numbers as they stand.
#define FUSIBLE_MULTIPLY_TILE(sums, of_b, of_a, tile)                              \
    _tile_loadd(of_b, b + (tile) * kTileHalves, 64);                               \
    _tile_loadd(of_a, a.at[0] + (tile) * kTileElements * a.rows[0], 4 * a.rows[0]); \
    _tile_dpbf16ps(sums, of_b, of_a)

// The same of rows in two tiles.
#define FUSIBLE_MULTIPLY_TWO_TILES(sums, sums_of_second, of_b, tile)               \
    FUSIBLE_MULTIPLY_TILE(sums, of_b, 6, tile);                                    \
    _tile_loadd(7, a.at[1] + (tile) * kTileElements * a.rows[1], 4 * a.rows[1]);    \
    _tile_dpbf16ps(sums_of_second, of_b, 7)

/// The tiles of a step. Where the scales are part of the values, or there is one, they add to sums that stay in tiles; else the sums of each block, or of
/// the step where a block is longer, are stored.
template <class Decoder, class Factors, int kSums>
inline void multiply_step(const std::uint16_t* b, const TiledRows<1>& a, float (&sums)[kSums][kTileCols * kLanes]) {
    if constexpr (Decoder::kFolds || Factors::kBlock == 0) {
        FUSIBLE_MULTIPLY_TILE(0, 4, 6, 0);
        FUSIBLE_MULTIPLY_TILE(1, 5, 7, 1);
        if constexpr (Decoder::kTiles == 4) {
            FUSIBLE_MULTIPLY_TILE(2, 4, 6, 2);
            FUSIBLE_MULTIPLY_TILE(3, 5, 7, 3);
        }
    } else if constexpr (Factors::kBlock == kTileElements) {
        _tile_zero(0);
        _tile_zero(1);
        FUSIBLE_MULTIPLY_TILE(0, 4, 6, 0);
        FUSIBLE_MULTIPLY_TILE(1, 5, 7, 1);
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
    } else {
        _tile_zero(0);
        FUSIBLE_MULTIPLY_TILE(0, 4, 6, 0);
        FUSIBLE_MULTIPLY_TILE(0, 5, 7, 1);
        _tile_stored(0, sums[0], 64);
    }
    tiles_touch(sums);
}

template <class Decoder, class Factors, int kSums>
inline void multiply_step(const std::uint16_t* b, const TiledRows<2>& a, float (&sums)[kSums][kTileCols * kLanes]) {
    constexpr bool kScales = !Decoder::kFolds && Factors::kBlock != 0;
    constexpr bool kApart = !kScales || Factors::kBlock == kTileElements;  // the sums of each tile
    if constexpr (kScales) {
        _tile_zero(0);
        _tile_zero(2);
        if constexpr (kApart) _tile_zero(1);
        if constexpr (kApart) _tile_zero(3);
    }
    FUSIBLE_MULTIPLY_TWO_TILES(0, 2, 4, 0);
    if constexpr (kApart) {
        FUSIBLE_MULTIPLY_TWO_TILES(1, 3, 5, 1);
    } else {
        FUSIBLE_MULTIPLY_TWO_TILES(0, 2, 5, 1);
    }
    if constexpr (Decoder::kTiles == 4) {
        FUSIBLE_MULTIPLY_TWO_TILES(0, 2, 4, 2);
        FUSIBLE_MULTIPLY_TWO_TILES(1, 3, 5, 3);
    }
    if constexpr (kScales) {
        _tile_stored(0, sums[0], 64);
        _tile_stored(2, sums[2], 64);
        if constexpr (kApart) _tile_stored(1, sums[1], 64);
        if constexpr (kApart) _tile_stored(3, sums[3], 64);
    }
    tiles_touch(sums);
}

/// Those that stay in tiles to the end of a section.
constexpr int tiles_of_sums(int tiles, int tiles_of_rows) { return tiles_of_rows == 2 ? 4 : tiles; }

/// The sums of a group over a section, `first` to `end`.
template <class Decoder, class Factors, int kTilesOfRows>
inline void multiply_group(const FewHalves& few, std::int64_t col, int cols, std::int64_t first, std::int64_t end,
                           TileScratch<Decoder, kTilesOfRows>& scratch, GroupSums (&sums)[kTilesOfRows]) {
    constexpr bool kScales = !Decoder::kFolds && Factors::kBlock != 0;
    constexpr int kPerByte = Decoder::kElements / Decoder::kBytes;
    constexpr int kSumTiles = tiles_of_sums(Decoder::kTiles, kTilesOfRows);
    alignas(64) float factors[kTileCols][Factors::kRoom];
    if constexpr (Factors::kBlock != 0) {
        Factors::read(few.codes, col, cols, first, static_cast<int>(end - first), factors);
        for (int c = cols; c < kTileCols; ++c) std::memcpy(factors[c], factors[cols - 1], sizeof factors[c]);
    }
    const std::uint8_t* b[kTileCols];  // columns that there are not are the last one again, and not used
    for (int c = 0; c < kTileCols; ++c) b[c] = few.codes.b + (col + (c < cols ? c : cols - 1)) * few.codes.b_stride + first / kPerByte;
    const std::int64_t ahead = kTileCols * few.codes.b_stride;
    const std::int64_t steps = (end - first + Decoder::kElements - 1) / Decoder::kElements;
    const auto a = TiledRows<kTilesOfRows>::of(few, first);
    if constexpr (!kScales) {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (kSumTiles == 4) _tile_zero(2);
        if constexpr (kSumTiles == 4) _tile_zero(3);
    }
    // A step is decoded while the tiles of the one before are multiplied, and the sums of the one before that are scaled: stores have arrived by then.
    for (std::int64_t step = 0; step < steps + 2; ++step) {
        if (step < steps) {
            const std::int64_t left = (end - first - step * Decoder::kElements) / kPerByte;
            std::uint16_t* const tiles = scratch.b[step % 2];
            for (int c = 0; c < kTileCols; ++c) {
                const std::uint8_t* source = b[c] + step * Decoder::kBytes;
                __builtin_prefetch(source + ahead);
                const float* const own = factors[c] + (Factors::kBlock == 0 ? 0 : step * Decoder::kElements / (Factors::kBlock + (Factors::kBlock == 0)));
                std::uint8_t padded[Decoder::kBytes];
                if (left < Decoder::kBytes) {
                    std::memset(padded, 0, sizeof padded);
                    std::memcpy(padded, source, static_cast<std::size_t>(left));
                    source = padded;
                }
                Decoder::decode(source, own, tiles + c * kTileElements);
            }
            tiles_touch(tiles);
        }
        if (step >= 1 && step <= steps) {
            const std::int64_t at = step - 1;
            multiply_step<Decoder, Factors>(scratch.b[at % 2], a.after(at * Decoder::kElements), scratch.sums[at % 2]);
        }
        if constexpr (kScales) {
            if (step < 2) continue;
            const std::int64_t at = (step - 2) * Decoder::kElements;
            for (int i = 0; i < kTilesOfRows; ++i) {
                sums[i].add_scaled(scratch.sums[step % 2][2 * i], factors, at / Factors::kBlock);
                if constexpr (Factors::kBlock == kTileElements)
                    sums[i].add_scaled(scratch.sums[step % 2][2 * i + 1], factors, at / Factors::kBlock + 1);
            }
        }
    }
    if constexpr (!kScales) {
        _tile_stored(0, scratch.sums[0][0], 64);
        _tile_stored(1, scratch.sums[0][1], 64);
        if constexpr (kSumTiles == 4) _tile_stored(2, scratch.sums[0][2], 64);
        if constexpr (kSumTiles == 4) _tile_stored(3, scratch.sums[0][3], 64);
        tiles_touch(scratch.sums);
        for (int i = 0; i < kSumTiles; ++i) sums[i * kTilesOfRows / kSumTiles].add(scratch.sums[0][i]);
    }
}

template <class Decoder, class Factors, int kTilesOfRows>
inline void multiply_tiles_of_rows(const FewHalves& few) {
    using gemm::FUSIBLE_LEVEL::transpose_units;
    using gemm::FUSIBLE_LEVEL::Units;
    TileScratch<Decoder, kTilesOfRows> scratch;
    const auto a = TiledRows<kTilesOfRows>::of(few, 0);
    configure_tiles(a);
    for (std::int64_t first = 0; first == 0 || first < few.codes.k; first += kSection) {
        const std::int64_t end = first + kSection < few.codes.k ? first + kSection : few.codes.k;
        for (std::int64_t col = 0; col < few.codes.cols; col += kTileCols) {
            const int cols = few.codes.cols - col < kTileCols ? static_cast<int>(few.codes.cols - col) : kTileCols;
            GroupSums sums[kTilesOfRows];
            multiply_group<Decoder, Factors>(few, col, cols, first, end, scratch, sums);
            for (int i = 0; i < kTilesOfRows; ++i) {
                Units turned[kTileCols];
                for (int c = 0; c < kTileCols; ++c) turned[c].v = bits(sums[i].of[c]).v;
                transpose_units(turned);
                for (int r = 0; r < a.rows[i]; ++r) {
                    float* const out = few.codes.sums + (i * kTileRows + r) * few.codes.sums_stride + col;
                    const F32 found = floats(I32{turned[r].v});
                    store(out, first == 0 ? found : add(load(out), found));
                }
            }
        }
    }
    _tile_release();
}

template <class Decoder, class Factors>
void multiply_by_tiles(const FewHalves& few) {
    few.codes.rows <= kTileRows ? multiply_tiles_of_rows<Decoder, Factors, 1>(few) : multiply_tiles_of_rows<Decoder, Factors, 2>(few);
}

}  // namespace
}  // namespace fusible::codes::FUSIBLE_LEVEL

#endif
