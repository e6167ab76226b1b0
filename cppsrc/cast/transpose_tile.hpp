// The transpose of a kTile x kTile square of bytes, in registers where the level has shuffles.
//
// A 16 x 16 square is transposed by four rounds of interleaving row i with row i + 8. Wide registers do one such square in each 128-bit lane;
// the lanes are then exchanged, so that every store writes as much of an output row as there is: a transposed matrix is written with a
// large stride, and a cache line written in pieces would be fetched once a piece.
#pragma once

#include <cstddef>

#include "cast/kernels.hpp"
#include "simd/simd.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

#if defined(FUSIBLE_SIMD_AVX512)

/// rows[16] -> columns[16]: lane L of columns[j] holds column 16 L + j of the sixteen rows.
inline void interleave16(__m512i (&r)[16]) {
    for (int round = 0; round < 4; ++round) {
        __m512i t[16];
        for (int i = 0; i < 8; ++i) {
            t[2 * i] = _mm512_unpacklo_epi8(r[i], r[i + 8]);
            t[2 * i + 1] = _mm512_unpackhi_epi8(r[i], r[i + 8]);
        }
        for (int i = 0; i < 16; ++i) r[i] = t[i];
    }
}

/// groups[g][j]: lane L holds column 16 L + j of rows 16 g to 16 g + 15 of a tile.
inline void interleave_tile(const std::uint8_t* source, std::ptrdiff_t source_stride, __m512i (&groups)[4][16]) {
    for (int g = 0; g < 4; ++g) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(source + (16 * g + i) * source_stride);
        interleave16(r);
        for (int i = 0; i < 16; ++i) groups[g][i] = r[i];
    }
}

/// columns[L] = column 16 L + j of a tile.
inline void gather_columns(const __m512i (&groups)[4][16], int j, __m512i (&columns)[4]) {
    const __m512i low01 = _mm512_shuffle_i64x2(groups[0][j], groups[1][j], 0x44);
    const __m512i low23 = _mm512_shuffle_i64x2(groups[2][j], groups[3][j], 0x44);
    const __m512i high01 = _mm512_shuffle_i64x2(groups[0][j], groups[1][j], 0xee);
    const __m512i high23 = _mm512_shuffle_i64x2(groups[2][j], groups[3][j], 0xee);
    columns[0] = _mm512_shuffle_i64x2(low01, low23, 0x88);
    columns[1] = _mm512_shuffle_i64x2(low01, low23, 0xdd);
    columns[2] = _mm512_shuffle_i64x2(high01, high23, 0x88);
    columns[3] = _mm512_shuffle_i64x2(high01, high23, 0xdd);
}

template <int kTiles>
inline void transpose_tiles(const std::uint8_t* source, std::ptrdiff_t source_stride, std::uint8_t* out, std::ptrdiff_t out_stride) {
    alignas(64) __m512i groups[kTiles][4][16];
    for (int t = 0; t < kTiles; ++t) interleave_tile(source + t * kTile * source_stride, source_stride, groups[t]);
    for (int j = 0; j < 16; ++j) {
        __m512i columns[kTiles][4];
        for (int t = 0; t < kTiles; ++t) gather_columns(groups[t], j, columns[t]);
        for (int lane = 0; lane < 4; ++lane)
            for (int t = 0; t < kTiles; ++t) _mm512_storeu_si512(out + (16 * lane + j) * out_stride + t * kTile, columns[t][lane]);
    }
}

inline void transpose_tile(const std::uint8_t* source, std::ptrdiff_t source_stride, std::uint8_t* out, std::ptrdiff_t out_stride) {
    transpose_tiles<1>(source, source_stride, out, out_stride);
}

#elif defined(FUSIBLE_SIMD_AVX2)

/// Transposes a strip of kTile rows and 32 columns: as above, with two lanes a register.
inline void transpose_strip(const std::uint8_t* source, std::ptrdiff_t source_stride, std::uint8_t* out, std::ptrdiff_t out_stride) {
    alignas(32) __m256i groups[4][16];
    for (int g = 0; g < 4; ++g) {
        __m256i r[16];
        for (int i = 0; i < 16; ++i)
            r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + (16 * g + i) * source_stride));
        for (int round = 0; round < 4; ++round) {
            __m256i t[16];
            for (int i = 0; i < 8; ++i) {
                t[2 * i] = _mm256_unpacklo_epi8(r[i], r[i + 8]);
                t[2 * i + 1] = _mm256_unpackhi_epi8(r[i], r[i + 8]);
            }
            for (int i = 0; i < 16; ++i) r[i] = t[i];
        }
        for (int i = 0; i < 16; ++i) groups[g][i] = r[i];
    }
    for (int j = 0; j < 16; ++j) {
        for (int half = 0; half < 2; ++half) {
            const __m256i a = groups[2 * half][j];
            const __m256i b = groups[2 * half + 1][j];
            auto* low = reinterpret_cast<__m256i*>(out + j * out_stride + 32 * half);
            auto* high = reinterpret_cast<__m256i*>(out + (16 + j) * out_stride + 32 * half);
            _mm256_storeu_si256(low, _mm256_permute2x128_si256(a, b, 0x20));
            _mm256_storeu_si256(high, _mm256_permute2x128_si256(a, b, 0x31));
        }
    }
}

inline void transpose_tile(const std::uint8_t* source, std::ptrdiff_t source_stride, std::uint8_t* out, std::ptrdiff_t out_stride) {
    transpose_strip(source, source_stride, out, out_stride);
    transpose_strip(source + 32, source_stride, out + 32 * out_stride, out_stride);
}

#else

/// An 8 x 8 square in eight 64-bit words: swaps blocks of 4, 2 and 1 across the diagonal (byte order does not matter to a swap).
inline void transpose8(std::uint64_t (&row)[8]) {
    constexpr std::uint64_t kMasks[3] = {0x00000000ffffffffu, 0x0000ffff0000ffffu, 0x00ff00ff00ff00ffu};
    for (int round = 0; round < 3; ++round) {
        const int distance = 4 >> round;
        for (int i = 0; i < 8; ++i) {
            if ((i & distance) != 0) continue;
            const std::uint64_t swapped = ((row[i] >> (8 * distance)) ^ row[i + distance]) & kMasks[round];
            row[i + distance] ^= swapped;
            row[i] ^= swapped << (8 * distance);
        }
    }
}

inline std::uint64_t load_little_endian(const std::uint8_t* source) {
    std::uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word |= static_cast<std::uint64_t>(source[i]) << (8 * i);
    return word;
}

inline void store_little_endian(std::uint8_t* out, std::uint64_t word) {
    for (int i = 0; i < 8; ++i) out[i] = static_cast<std::uint8_t>(word >> (8 * i));
}

inline void transpose_tile(const std::uint8_t* source, std::ptrdiff_t source_stride, std::uint8_t* out, std::ptrdiff_t out_stride) {
    for (int c = 0; c < kTile; c += 8) {
        for (int r = 0; r < kTile; r += 8) {
            std::uint64_t row[8];
            for (int i = 0; i < 8; ++i) row[i] = load_little_endian(source + (r + i) * source_stride + c);
            transpose8(row);
            for (int i = 0; i < 8; ++i) store_little_endian(out + (c + i) * out_stride + r, row[i]);
        }
    }
}

#endif

/// Two tiles, one below the other, written a row of the output at a time: where rows lie powers of two apart, their lines share few sets of a cache.
inline void transpose_pair(const std::uint8_t* source, std::ptrdiff_t source_stride, std::uint8_t* out, std::ptrdiff_t out_stride) {
#if defined(FUSIBLE_SIMD_AVX512)
    transpose_tiles<2>(source, source_stride, out, out_stride);
#else
    transpose_tile(source, source_stride, out, out_stride);
    transpose_tile(source + kTile * source_stride, source_stride, out + kTile, out_stride);
#endif
}

}  // namespace
}  // namespace fusible::cast::FUSIBLE_LEVEL
