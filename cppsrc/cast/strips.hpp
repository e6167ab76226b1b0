// The cast of one strip of a matrix, with its transposed copy and its column sums from the same read.
#pragma once

#include "cast/runs.hpp"
#include "cast/transpose_tile.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Codes of a strip, rows kStripCols apart.
struct Codes {
    alignas(64) std::uint8_t at[kTile * kStripCols];
};

/// Fetches what the next strip reads: its rows lie a matrix row apart, which is more streams than a CPU follows by itself.
template <class S>
inline void prefetch_step(const S* source) {
#if defined(__GNUC__)
    constexpr std::size_t kCacheLine = 64;
    for (std::size_t i = 0; i < kStep; i += kCacheLine / sizeof(S)) __builtin_prefetch(source + i, 0, 2);
#endif
}

/// Lines far apart of which `bytes` each are written at once, later: they are asked for one by one while what they are to hold is made.
struct Ahead {
    std::uint8_t* first;  // null: none
    std::ptrdiff_t stride;
    int count;
    int bytes;

    void ask(int line) const {
#if defined(__GNUC__)
        constexpr int kCacheLine = 64;
        if (first == nullptr || line >= count) return;
        for (int i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(first + line * stride + i, 1, 2);
#endif
    }
};

/// Quantizes `rows` rows of `cols` columns (a multiple of kTile) into `codes`, and where these are whole into the strip's own; with WithSums, adds each
/// column into sums[cols].
template <class S, class F, bool WithSums, bool kWhole>
[[gnu::flatten]] inline std::int32_t encode_strip(const StripArguments& given, const S* source, std::ptrdiff_t stride, int cols, std::uint8_t* codes,
                                                  float* sums) {
    const StripArguments strip = given;
    const int rows = strip.rows;
    const float scale = strip.scale;
    const Ahead transposed{strip.transposed, strip.transposed_stride, strip.cols, 1};
    const F32 factor = splat(scale);
    const F32 factors[4] = {factor, factor, factor, factor};
    I32 amax[4] = {splat(0), splat(0), splat(0), splat(0)};
    for (int r = 0; r < rows; ++r) {
        transposed.ask(r);
        for (int c = 0; c < cols; c += kStep) {
            prefetch_step(source + r * stride + c + kStripCols);
            F32 x[4];
            for (int v = 0; v < 4; ++v) {
                x[v] = load(source + r * stride + c + v * kLanes);
                if constexpr (WithSums) store(sums + c + v * kLanes, add(load(sums + c + v * kLanes), x[v]));
            }
            const Bytes encoded = encode<F>(x, factors, amax);
            store_bytes(codes + r * kStripCols + c, encoded);
            if (kWhole && strip.codes != nullptr) store_bytes(strip.codes + r * strip.codes_stride + c, encoded);
        }
    }
    return max_lane(max(max(amax[0], amax[1]), max(amax[2], amax[3])));
}

template <class S, class F>
std::int32_t encode_strip_slowly(const S* source, std::ptrdiff_t stride, int rows, int cols, std::uint8_t* codes, float scale) {
    std::int32_t amax = 0;
    for (int r = 0; r < rows; ++r) {
        const std::int32_t found = quantize_slowly<S, F>(source + r * stride, codes + r * kStripCols, static_cast<std::size_t>(cols), scale);
        amax = found > amax ? found : amax;
    }
    return amax;
}

/// `sums`: null, or of `cols` columns. What is not finite is encoded again, slowly, into `codes` alone; returns whether it was in `again`.
template <class S, class F, bool kWhole>
std::int32_t encode_padded(const StripArguments& strip, const S* source, std::ptrdiff_t stride, int cols, std::uint8_t* codes, float* sums, bool& again) {
    const std::int32_t amax = sums != nullptr ? encode_strip<S, F, true, kWhole>(strip, source, stride, cols, codes, sums)
                                              : encode_strip<S, F, false, kWhole>(strip, source, stride, cols, codes, nullptr);
    again = amax > kInfinityBits || !is_plain(strip.scale);
    return again ? encode_strip_slowly<S, F>(source, stride, strip.rows, cols, codes, strip.scale) : amax;
}

/// A strip whose width is no multiple of kTile, padded with zeros to one that is: they change neither the amax nor a sum.
template <class S, class F>
std::int32_t encode_ragged(const StripArguments& strip, std::uint8_t* codes) {
    S padded[kTile * kStripCols];
    float sums[kStripCols] = {};
    const int cols = (strip.cols + kTile - 1) / kTile * kTile;
    for (int r = 0; r < strip.rows; ++r) {
        S* row = padded + r * kStripCols;
        const S* source = static_cast<const S*>(strip.source) + r * strip.source_stride;
        std::memcpy(static_cast<void*>(row), source, sizeof(S) * static_cast<std::size_t>(strip.cols));
        std::memset(static_cast<void*>(row + strip.cols), 0, sizeof(S) * static_cast<std::size_t>(cols - strip.cols));
    }
    bool again = false;
    if (strip.column_sums == nullptr) return encode_padded<S, F, false>(strip, padded, kStripCols, cols, codes, nullptr, again);
    std::memcpy(sums, strip.column_sums, sizeof(float) * static_cast<std::size_t>(strip.cols));
    const std::int32_t amax = encode_padded<S, F, false>(strip, padded, kStripCols, cols, codes, sums, again);
    std::memcpy(strip.column_sums, sums, sizeof(float) * static_cast<std::size_t>(strip.cols));
    return amax;
}

inline void copy_rows(const std::uint8_t* from, std::ptrdiff_t from_stride, std::uint8_t* to, std::ptrdiff_t to_stride, int rows, int cols) {
    int c = 0;
    for (; c + kTile <= cols; c += kTile)  // a length known to the compiler: a call a row would cost as much as the cast
        for (int r = 0; r < rows; ++r) std::memcpy(to + r * to_stride + c, from + r * from_stride + c, kTile);
    if (c == cols) return;
    for (int r = 0; r < rows; ++r) std::memcpy(to + r * to_stride + c, from + r * from_stride + c, static_cast<std::size_t>(cols - c));
}

inline void write_transposed(const StripArguments& strip, const std::uint8_t* codes) {
    for (int c = 0; c < strip.cols; c += kTile) {
        const int cols = strip.cols - c < kTile ? strip.cols - c : kTile;
        std::uint8_t* out = strip.transposed + c * strip.transposed_stride;
        if (strip.rows == kTile && cols == kTile) {
            transpose_tile(codes + c, kStripCols, out, strip.transposed_stride);
            continue;
        }
        alignas(64) std::uint8_t tile[kTile * kTile];
        transpose_tile(codes + c, kStripCols, tile, kTile);
        copy_rows(tile, kTile, out, strip.transposed_stride, cols, strip.rows);
    }
}

template <class S, class F>
std::int32_t quantize_strip(const StripArguments& strip) {
    Codes codes;
    // Rows that the strip lacks are transposed along with the rest, and not copied out.
    if (strip.rows < kTile) std::memset(codes.at, 0, sizeof codes.at);
    bool to_copy = true;
    const std::int32_t amax = strip.cols % kTile != 0
                                  ? encode_ragged<S, F>(strip, codes.at)
                                  : encode_padded<S, F, true>(strip, static_cast<const S*>(strip.source), strip.source_stride, strip.cols, codes.at,
                                                              strip.column_sums, to_copy);
    if (to_copy && strip.codes != nullptr) copy_rows(codes.at, kStripCols, strip.codes, strip.codes_stride, strip.rows, strip.cols);
    if (strip.transposed != nullptr) write_transposed(strip, codes.at);
    return amax;
}

}  // namespace
}  // namespace fusible::cast::FUSIBLE_LEVEL
