// Blocks of 128 elements with an fp32 scale each, along rows, along columns and as squares, from one read of a square; and back.
#pragma once

#include "cast/halves.hpp"
#include "cast/mx_bands.hpp"
#include "cast/strips.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr int kSquareVectors = kScaledBlock / kLanes;
constexpr int kSquareSize = kScaledBlock * kScaledBlock;
static_assert(kScaledBlock % kTile == 0 && kTile % kStep == 0, "a square has whole tiles, and these have whole steps");
static_assert(kStripCols == kTile, "a strip is a tile wide");
static_assert(kScaledBlock == 2 * kTile, "a square is two tiles high");

constexpr std::int32_t kMostBits = 0x7f7fffff;  // the largest finite float

/// The largest finite number of a type, as the bits of a float.
template <class S>
constexpr std::int32_t kMostBitsOf = kMostBits;
template <>
constexpr std::int32_t kMostBitsOf<f16> = 0x477fe000;  // 65504
template <>
constexpr std::int32_t kMostBitsOf<bf16> = 0x7f7f0000;

/// The amaxes of the lines of a square as bits, then their scales. Lines that a square lacks have an amax of 0.
struct Lines {
    alignas(64) std::int32_t amax[kScaledBlock] = {};
    alignas(64) float scale[kScaledBlock];
    HalfScales<kScaledBlock> halves;  // set where the scales are powers of two and the elements bf16
};

constexpr int kSquareHalves = kSquareVectors / 2;

/// Finds the amaxes of `rows` rows of kScaledBlock elements, and of their columns; returns the largest.
template <class S>
inline std::int32_t find_amaxes(const S* source, std::ptrdiff_t stride, int rows, const Ahead& ahead, Lines& of_rows, Lines& of_columns) {
    I32 columns[kSquareVectors];
    for (int v = 0; v < kSquareVectors; ++v) columns[v] = splat(0);
    for (int r = 0; r < rows; ++r) {
        ahead.ask(r);
        I32 row = splat(0);
        for (int v = 0; v < kSquareVectors; ++v) {
            const I32 magnitude = magnitude_of(load(source + r * stride + v * kLanes));
            row = max(row, magnitude);
            columns[v] = max(columns[v], magnitude);
        }
        of_rows.amax[r] = max_lane(row);
    }
    I32 largest = splat(0);
    for (int v = 0; v < kSquareVectors; ++v) {
        store_words(of_columns.amax + v * kLanes, columns[v]);
        largest = max(largest, columns[v]);
    }
    return max_lane(largest);
}

inline std::int32_t find_amaxes(const bf16* source, std::ptrdiff_t stride, int rows, const Ahead& ahead, Lines& of_rows, Lines& of_columns) {
    U16 columns[kSquareHalves];
    for (int v = 0; v < kSquareHalves; ++v) columns[v] = splat(std::uint16_t{0});
    for (int r = 0; r < rows; ++r) {
        ahead.ask(r);
        U16 row = splat(std::uint16_t{0});
        for (int v = 0; v < kSquareHalves; ++v) {
            const U16 magnitude = both(load_halves(source + r * stride + v * 2 * kLanes), splat(std::uint16_t{0x7fff}));
            row = max(row, magnitude);
            columns[v] = max(columns[v], magnitude);
        }
        of_rows.amax[r] = max_lane(larger_of_pairs(row));
    }
    return store_magnitudes(columns, of_columns.amax);
}

/// fp8_max / max(amax, epsilon), or the largest number of S where that overflows; 1 for an amax that is 0, infinite or NaN. So `encode` takes it.
template <class S, class F>
inline F32 scale_of_amax(I32 amax, float epsilon, bool power_of_two) {
    const F32 least = splat(epsilon);
    const F32 one = splat(1.0f);
    const F32 most = floats(splat(kMostBits));
    const F32 found = floats(amax);
    const F32 magnitude = select_less(found, least, least, found);
    F32 scale = div(floats(splat(F::kMaxBits)), magnitude);
    scale = select_less(most, scale, floats(splat(kMostBitsOf<S>)), scale);
    if (power_of_two) scale = floats(both(bits(scale), splat(kInfinityBits)));
    return select_less(splat(0.0f), magnitude, select_at_most(magnitude, most, scale, one), one);
}

/// Scales of lines, and the inverses of the first `count` written to `out`, where it is not null.
template <class S, class F>
inline void find_scales(const ScaledBand& band, Lines& lines, float* out, int count) {
    alignas(64) float inverse[kScaledBlock];
    for (int i = 0; i < kScaledBlock; i += kLanes) {
        const F32 scale = scale_of_amax<S, F>(load_words(lines.amax + i), band.epsilon, band.power_of_two);
        store(lines.scale + i, scale);
        if (kIsBf16<S> && band.power_of_two) set_scales<F>(lines.halves, i, shift_right<23>(bits(scale)));
        store(inverse + i, div(splat(1.0f), scale));
    }
    if (out != nullptr) std::memcpy(out, inverse, sizeof(float) * static_cast<std::size_t>(count));
}

/// Where a column's codes lie before they are transposed: tiles beside each other have one after the other.
inline std::ptrdiff_t place(int r, int c) { return (c / kTile * kScaledBlock + r) * kTile + c % kTile; }

/// What is written of a square: codes of rows, and those of columns by `place`.
struct SquareCodes {
    std::uint8_t* rows;
    std::ptrdiff_t stride;
    std::uint8_t* columns;
};

/// The columns [first, last) of row r, in steps; `source` is where the row begins.
template <class S, class F, bool kRows, bool kColumns>
[[gnu::flatten]] inline void encode_square_row(const S* source, int r, int first, int last, F32 factor, const Lines& of_columns, bool tiled,
                                               const SquareCodes& out) {
    for (int c = first; c < last; c += kStep) {
        prefetch_step(source + c + kScaledBlock);  // the next square's
        F32 x[4];
        F32 scale[4];
        I32 unused[4] = {};
        for (int v = 0; v < 4; ++v) {
            x[v] = load(source + c + v * kLanes);
            scale[v] = factor;
        }
        Bytes codes = encode<F>(x, scale, unused);
        if constexpr (kRows) store_bytes(out.rows + r * out.stride + c, codes);
        if constexpr (kColumns) {
            if (!kRows || !tiled) {  // the codes of a square are the same in both copies
                for (int v = 0; v < 4; ++v) scale[v] = load(of_columns.scale + c + v * kLanes);
                codes = encode<F>(x, scale, unused);
            }
            store_bytes(out.columns + place(r, c), codes);
        }
    }
}

template <class S, class F, bool kRows, bool kColumns>
inline void encode_square(const S* source, std::ptrdiff_t stride, int rows, const Lines& of_rows, const Lines& of_columns, bool tiled,
                          const SquareCodes& out) {
    for (int r = 0; r < rows; ++r)
        encode_square_row<S, F, kRows, kColumns>(source + r * stride, r, 0, kScaledBlock, splat(of_rows.scale[r]), of_columns, tiled, out);
}

/// Apart from the loops that rarely come here, which it would take registers from.
template <class F, bool kRows, bool kColumns>
[[gnu::noinline]] void encode_again(const bf16* source, int r, int c, float scale, const Lines& of_columns, bool tiled, const SquareCodes& out) {
    encode_square_row<bf16, F, kRows, kColumns>(source, r, c, c + kStep, splat(scale), of_columns, tiled, out);
}

/// Row r of bf16 where the scales are powers of two; returns how many of its steps were encoded again as floats.
template <class F, bool kRows, bool kColumns>
inline int encode_row_halves(const bf16* source, int r, const Lines& of_rows, const Lines& of_columns, bool tiled, const SquareCodes& out) {
    const U16 offset = splat(of_rows.halves.offset[r]);
    const U16 limit = splat(of_rows.halves.limit[r]);
    int again = 0;
    for (int c = 0; c < kScaledBlock; c += kStep) {
        prefetch_step(source + c + kScaledBlock);
        U16 missed = splat(std::uint16_t{0});
        Halves x[kStepHalves];
        U16 codes[kStepHalves];
        for (int v = 0; v < kStepHalves; ++v) x[v] = Halves::of<F>(load_halves(source + c + v * 2 * kLanes));
        if constexpr (kRows) {
            for (int v = 0; v < kStepHalves; ++v) codes[v] = x[v].template codes<F>(offset, limit, missed);
            store_bytes(out.rows + r * out.stride + c, codes);
        }
        if constexpr (kColumns) {
            if (!kRows || !tiled) {
                for (int v = 0; v < kStepHalves; ++v) {
                    const int i = c + v * 2 * kLanes;
                    codes[v] = x[v].template codes<F>(load_halves(of_columns.halves.offset + i), load_halves(of_columns.halves.limit + i), missed);
                }
            }
            store_bytes(out.columns + place(r, c), codes);
        }
        if (any(missed)) {
            encode_again<F, kRows, kColumns>(source, r, c, of_rows.scale[r], of_columns, tiled, out);
            ++again;
        }
    }
    return again;
}

template <class F, bool kRows, bool kColumns>
inline void encode_square_halves(const bf16* source, std::ptrdiff_t stride, int rows, const Lines& of_rows, const Lines& of_columns, bool tiled,
                                 const SquareCodes& out, Trials& trials) {
    if (!trials.is_due()) return encode_square<bf16, F, kRows, kColumns>(source, stride, rows, of_rows, of_columns, tiled, out);
    int again = 0;
    for (int r = 0; r < rows; ++r) again += encode_row_halves<F, kRows, kColumns>(source + r * stride, r, of_rows, of_columns, tiled, out);
    trials.note(again, rows * (kScaledBlock / kStep));
}

template <class S, class F, bool kRows, bool kColumns>
inline void encode_lines(const ScaledBand& band, const S* source, std::ptrdiff_t stride, const Lines& of_rows, const Lines& of_columns,
                         const SquareCodes& out, Trials& trials) {
    if constexpr (kIsBf16<S>) {
        if (band.power_of_two) return encode_square_halves<F, kRows, kColumns>(source, stride, band.rows, of_rows, of_columns, band.tiled, out, trials);
    }
    encode_square<S, F, kRows, kColumns>(source, stride, band.rows, of_rows, of_columns, band.tiled, out);
}

/// The codes of NaN, which `encode` does not give.
template <class S, class F>
inline void encode_nans(const S* source, std::ptrdiff_t stride, int rows, const SquareCodes& out) {
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < kScaledBlock; ++c) {
            const float x = to_float(source[r * stride + c]);
            if (x == x) continue;
            if (out.rows != nullptr) out.rows[r * out.stride + c] = encode_one<F>(x);
            if (out.columns != nullptr) out.columns[place(r, c)] = encode_one<F>(x);
        }
    }
}

/// A square of `rows` rows and `cols` columns, of which `source` has kScaledBlock columns.
template <class S, class F>
inline void quantize_square(const ScaledBand& band, int c, int cols, const S* source, std::ptrdiff_t stride, const SquareCodes& out, Trials& trials) {
    Lines of_rows;
    Lines of_columns;
    const Ahead transposed{out.columns == nullptr ? nullptr : band.column_codes + c * band.column_stride, band.column_stride, cols, band.rows};
    const std::int32_t amax = find_amaxes(source, stride, band.rows, transposed, of_rows, of_columns);
    if (band.tiled)
        for (int i = 0; i < kScaledBlock; ++i) of_rows.amax[i] = of_columns.amax[i] = amax;
    const int b = c / kScaledBlock;
    float* const scales = band.scales == nullptr ? nullptr : band.scales + b * band.scales_step;
    float* const column_scales = band.column_scales == nullptr ? nullptr : band.column_scales + b * band.column_scales_step;
    if (out.rows != nullptr) find_scales<S, F>(band, of_rows, scales, band.tiled ? 1 : band.rows);
    if (out.columns != nullptr) find_scales<S, F>(band, of_columns, column_scales, band.tiled ? 1 : cols);
    if (out.columns == nullptr)
        encode_lines<S, F, true, false>(band, source, stride, of_rows, of_columns, out, trials);
    else if (out.rows == nullptr)
        encode_lines<S, F, false, true>(band, source, stride, of_rows, of_columns, out, trials);
    else
        encode_lines<S, F, true, true>(band, source, stride, of_rows, of_columns, out, trials);
    if (amax > kInfinityBits) encode_nans<S, F>(source, stride, band.rows, out);
    if (out.columns == nullptr) return;
    for (int j = 0; j < cols; j += kTile) {
        std::uint8_t* const transposed = band.column_codes + (c + j) * band.column_stride;
        if (band.rows == kScaledBlock && cols - j >= kTile) {
            transpose_pair(out.columns + place(0, j), kTile, transposed, band.column_stride);
            continue;
        }
        for (int r = 0; r < band.rows; r += kTile) {
            StripArguments tile{};
            tile.rows = band.rows - r < kTile ? band.rows - r : kTile;
            tile.cols = cols - j < kTile ? cols - j : kTile;
            tile.transposed = transposed + r;
            tile.transposed_stride = band.column_stride;
            write_transposed(tile, out.columns + place(r, j));
        }
    }
}

/// The last square of rows whose length is no multiple of kScaledBlock, padded with zeros to one that is: they change no amax.
template <class S, class F>
inline void quantize_ragged(const ScaledBand& band, int c, int cols, std::uint8_t* columns, Trials& trials) {
    alignas(64) S padded[kSquareSize];
    alignas(64) std::uint8_t codes[kSquareSize];
    for (int r = 0; r < band.rows; ++r) {
        S* row = padded + r * kScaledBlock;
        std::memcpy(static_cast<void*>(row), static_cast<const S*>(band.source) + r * band.stride + c, sizeof(S) * static_cast<std::size_t>(cols));
        std::memset(static_cast<void*>(row + cols), 0, sizeof(S) * static_cast<std::size_t>(kScaledBlock - cols));
    }
    const bool asked = band.codes != nullptr;
    quantize_square<S, F>(band, c, cols, padded, kScaledBlock, {asked ? codes : nullptr, kScaledBlock, columns}, trials);
    if (asked) copy_rows(codes, kScaledBlock, band.codes + c, band.stride, band.rows, cols);
}

template <class S, class F>
void quantize_blocks(const ScaledBand& band) {
    alignas(64) std::uint8_t square[kSquareSize];
    std::uint8_t* const columns = band.column_codes == nullptr ? nullptr : square;
    Trials trials;
    // Rows that a tile lacks are transposed along with the rest, and not copied out.
    if (columns != nullptr && band.rows % kTile != 0) std::memset(square, 0, sizeof square);
    int c = 0;
    for (; c + kScaledBlock <= band.cols; c += kScaledBlock) {
        std::uint8_t* const codes = band.codes == nullptr ? nullptr : band.codes + c;
        quantize_square<S, F>(band, c, kScaledBlock, static_cast<const S*>(band.source) + c, band.stride, {codes, band.stride, columns}, trials);
    }
    if (c < band.cols) quantize_ragged<S, F>(band, c, band.cols - c, columns, trials);
}

/// `count` <= kScaledBlock values of a block.
template <class F, class S>
inline void dequantize_block(const std::uint8_t* codes, S* out, int count, F32 scale, Magnitudes& seen) {
    const int whole = count - count % kLanes;
    for (int i = 0; i < whole; i += kLanes) {
        const F32 value = mul(decode<F>(load_bytes(codes + i)), scale);
        seen.add(value);
        store(out + i, value);
    }
    if (whole == count) return;
    std::uint8_t padded[kLanes] = {};
    S values[kLanes];
    std::memcpy(padded, codes + whole, static_cast<std::size_t>(count - whole));
    const F32 value = mul(decode<F>(load_bytes(padded)), scale);
    seen.add(value);
    store(values, value);
    std::memcpy(static_cast<void*>(out + whole), values, static_cast<std::size_t>(count - whole) * sizeof(S));
}

template <class F, class S>
bool dequantize_blocks(const ScaledCodes& lines, void* untyped) {
    Magnitudes seen;
    std::int32_t mantissas = 0;
    for (int r = 0; r < lines.lines; ++r) {
        const std::uint8_t* codes = lines.codes + r * lines.stride;
        S* out = static_cast<S*>(untyped) + r * lines.stride;
        const float* scale = lines.scales + r * lines.line_step;
        for (int c = 0; c < lines.length; c += kScaledBlock, scale += lines.block_step) {
            mantissas |= bits_of(*scale) & 0x7fffff;
            dequantize_block<F>(codes + c, out + c, lines.length - c < kScaledBlock ? lines.length - c : kScaledBlock, splat(*scale), seen);
        }
    }
    return mantissas == 0 && seen.are_plain();
}

}  // namespace
}  // namespace fusible::cast::FUSIBLE_LEVEL
