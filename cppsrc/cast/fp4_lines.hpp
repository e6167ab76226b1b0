// E2M1 in blocks of 16 with an E4M3 scale each (NVFP4; NVIDIA 2025, arXiv:2509.25149), of lines that are the rows or the columns of a matrix; and back.
//
// Steps and their order are those of tex/backends/torch_backend/nvfp4_scales.py, each rounded to float: codes and scales are torch's to the bit.
#pragma once

#include "cast/e2m1.hpp"
#include "cast/strips.hpp"
#include "simd/random_words.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr int kBlockSteps = kFp4Block / kLanes;
constexpr int kSpanBlocks = 16;                          // blocks of a row whose scales are worked out together
constexpr std::uint8_t kNanCodes = 0x77;                 // two elements of a block whose factor is NaN
static_assert(kFp4Block % kLanes == 0 && kStep % kFp4Block == 0, "a step has whole blocks, and a block whole vectors");
static_assert(kFp4PartRows == 2 * kTile && kFp4PartCols % kTile == 0, "a part has the codes of whole tiles of pairs");

/// 1 / (value * from_scale), at most the largest float; NaN of NaN.
inline float factor_of(float value, float from_scale) {
    constexpr float kLargest = 3.40282347e+38f;
    const float quotient = 1.0f / (value * from_scale);
    return quotient > kLargest ? kLargest : quotient;
}

inline float value_of_e4m3(std::uint8_t code) {
    std::uint8_t codes[kLanes] = {code};
    float values[kLanes];
    store(values, decode<E4M3>(load_bytes(codes)));
    return values[0];
}

/// Of the maxima of kStep blocks, bits of floats: their scales as E4M3, and the factors of their elements. Returns whether one of these may be NaN.
inline bool scale_blocks(const Fp4Part& part, const std::int32_t* amaxes, std::uint8_t* scales, float* factors) {
    I32 largest = splat(bits_of(part.from_amax) & 0x7fffffff);
    for (int v = 0; v < 4; ++v) largest = max(largest, load_words(amaxes + v * kLanes));
    if (max_lane(largest) > kInfinityBits) {  // a NaN
        for (int i = 0; i < kStep; ++i) {
            scales[i] = encode_one<E4M3>(float_of(amaxes[i]) * part.from_amax) & 0x7f;
            factors[i] = factor_of(value_of_e4m3(scales[i]), part.from_scale);
        }
        return true;
    }
    I32 codes[4];
    for (int v = 0; v < 4; ++v) {
        codes[v] = both(encode_magnitude<E4M3>(load_words(amaxes + v * kLanes), splat(part.from_amax)), splat(0x7f));
        const F32 quotient = div(splat(1.0f), mul(decode<E4M3>(codes[v]), splat(part.from_scale)));
        store(factors + v * kLanes, min(quotient, splat(3.40282347e+38f)));
    }
    store_bytes(scales, codes);
    return false;
}

/// Codes of |x| * factor, rounded to one of their two neighbours: up where the place between them and `addend`, 22 bits each, have a carry.
///
/// Twice a size from 1 on, and 1 more than one below, are floats whose bits count codes, with 22 bits after the point: where the format has its
/// subnormal numbers, the sum has one exponent, too. Rounding that sum up loses nothing: a place is above a number of 17 bits or it is not.
inline I32 encode_stochastically(F32 x, F32 factor, I32 addend) {
    const F32 size = floats(min(bits(mul(floats(magnitude_of(x)), factor)), splat(std::int32_t{E2M1::kMaxBits})));
    return shift_right<22>(add(bits(add_up(size, max(size, splat(1.0f)))), addend));
}

/// By 16 random bits h, in bits 6 to 21 of each lane: all of 22 bits set, less h + 1/2 in units of 2^6; and what takes the bits of 1.0f to zero.
inline I32 addend_of(I32 bits) {
    constexpr std::uint32_t kLessOne = 0u - 0x3f800000u;
    static_assert((kLessOne & 0x3fffff) == 0, "the two have no bit in common");
    return exclusive_or(both(bits, splat(std::int32_t{0x3fffc0})), splat(static_cast<std::int32_t>(kLessOne | 0x3fffdfu)));
}

/// The addends of kStep elements of a line, the first of which is number `element` of the copy.
inline void draw_along(const Fp4Part& part, std::uint64_t element, I32 (&addends)[4]) {
    random_quarters(part.key, element / 4, addends);
    for (I32& each : addends) each = addend_of(shift_left<6>(each));
}

/// Those of four elements each, from number `element` on, of kStep lines: [element][vector of lines].
inline void draw_across(const Fp4Part& part, std::uint64_t element, I32 (&addends)[4][4]) {
    const std::uint64_t step = part.line_counters / 4;
    for (int v = 0; v < 4; ++v) {
        const LongWords words = long_random_words(part.key, element / 4 + static_cast<std::uint64_t>(v * kLanes) * step, step);
        addends[0][v] = addend_of(shift_left<6>(words.lower));
        addends[1][v] = addend_of(shift_right<10>(words.lower));
        addends[2][v] = addend_of(shift_left<6>(words.upper));
        addends[3][v] = addend_of(shift_right<10>(words.upper));
    }
}

/// Codes of four vectors, with their signs in bit 7; where `kAtRandom`, rounded by `addends`.
template <bool kAtRandom>
inline Bytes encode_fp4(const F32 (&x)[4], const F32 (&factor)[4], const I32 (&addends)[4]) {
    I32 codes[4] = {};
    if constexpr (!kAtRandom) return encode<E2M1>(x, factor, codes);
    for (int v = 0; v < 4; ++v) codes[v] = encode_stochastically(x[v], factor[v], addends[v]);
    return join_signs(codes, x);
}

/// The amax of every square of kFp4Block blocks of a line each, given to each of its lines.
inline void spread_over_lines(std::int32_t (&amaxes)[kFp4Block][kSpanBlocks]) {
    for (int b = 0; b < kSpanBlocks; b += kLanes) {
        I32 largest = splat(0);
        for (const auto& line : amaxes) largest = max(largest, load_words(line + b));
        for (auto& line : amaxes) store_words(line + b, largest);
    }
}

/// The first `count` <= kStep of the values, and zeros.
template <class S>
inline void load_step(const S* source, int count, F32 (&x)[4]) {
    for (int v = 0; v < 4; ++v) x[v] = v * kLanes < count ? load(source + v * kLanes) : splat(0.0f);
}

/// The codes of `count` <= kStep elements of a row, two to a byte.
inline void store_halves(std::uint8_t* out, const Bytes& codes, int count) {
    if (count == kStep) return store_nibbles(out, codes);
    std::uint8_t padded[kStep / 2];
    store_nibbles(padded, codes);
    std::memcpy(out, padded, static_cast<std::size_t>(count / 2));
}

/// The codes of a row in a span of blocks.
template <class S, bool kAtRandom>
[[gnu::flatten]] inline void encode_row(const Fp4Part& part, int row, int col, int blocks, const float* factors) {
    const S* const source = static_cast<const S*>(part.source) + row * part.stride + col;
    std::uint8_t* const codes = part.codes + row * part.codes_stride + col / 2;
    const std::uint64_t counter = part.counter + static_cast<std::uint64_t>(row) * part.line_counters + static_cast<std::uint64_t>(col);
    const auto encode_step = [&](int c, int count) {
        F32 x[4];
        F32 factor[4];
        I32 addends[4];
        load_step(source + c, count, x);
        for (int v = 0; v < 4; ++v) factor[v] = splat(factors[(c + v * kLanes) / kFp4Block]);
        if constexpr (kAtRandom) draw_along(part, counter + static_cast<std::uint64_t>(c), addends);
        store_halves(codes + c / 2, encode_fp4<kAtRandom>(x, factor, addends), count);
    };
    const int width = blocks * kFp4Block;
    int c = 0;
    for (; c + kStep <= width; c += kStep) encode_step(c, kStep);
    if (c < width) encode_step(c, width - c);
}

/// The amax of each block of a row in a span, as bits. Always inlined: how many they are is mostly known there.
template <class S>
[[gnu::always_inline]] inline void block_maxima(const S* source, int blocks, std::int32_t* amaxes) {
    for (int first = 0; first < blocks; first += kLanes) {
        I32 largest[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            largest[i] = splat(0);
            const S* const block = source + (first + i) * kFp4Block;
            if (first + i >= blocks) continue;
            for (int v = 0; v < kBlockSteps; ++v) largest[i] = max(largest[i], magnitude_of(load(block + v * kLanes)));
        }
        store_words(amaxes + first, largest_of_each(largest));
    }
}

/// Again, for the blocks of a row whose factor is NaN.
inline void write_nans(const Fp4Part& part, int row, int col, int blocks, const float* factors) {
    std::uint8_t* const codes = part.codes + row * part.codes_stride + col / 2;
    for (int b = 0; b < blocks; ++b)
        if (factors[b] != factors[b]) std::memset(codes + b * kFp4Block / 2, kNanCodes, kFp4Block / 2);
}

template <class S, bool kAtRandom>
void quantize_rows(const Fp4Part& given) {
    const Fp4Part part = given;  // bytes that are written might be its own, as far as a compiler knows
    constexpr int kSpan = kSpanBlocks * kFp4Block;
    for (int first = 0; first < part.rows; first += kFp4Block) {
        for (int col = 0; col < part.cols; col += kSpan) {
            const int blocks = part.cols - col < kSpan ? (part.cols - col) / kFp4Block : kSpanBlocks;
            alignas(64) std::int32_t amaxes[kFp4Block][kSpanBlocks] = {};
            alignas(64) float factors[kFp4Block][kSpanBlocks];
            std::uint8_t scales[kFp4Block][kSpanBlocks];
            for (int line = 0; line < kFp4Block; ++line) {
                const S* const source = static_cast<const S*>(part.source) + (first + line) * part.stride + col;
                if (blocks == kSpanBlocks)
                    block_maxima(source, kSpanBlocks, amaxes[line]);
                else
                    block_maxima(source, blocks, amaxes[line]);
            }
            if (part.tiled) spread_over_lines(amaxes);
            bool any_nan = false;
            for (int i = 0; i < kFp4Block * kSpanBlocks; i += kStep) any_nan |= scale_blocks(part, amaxes[0] + i, scales[0] + i, factors[0] + i);
            for (int line = 0; line < kFp4Block; ++line) {
                std::memcpy(part.scales + (first + line) * part.scales_stride + col / kFp4Block, scales[line], static_cast<std::size_t>(blocks));
                encode_row<S, kAtRandom>(part, first + line, col, blocks, factors[line]);
                if (any_nan) write_nans(part, first + line, col, blocks, factors[line]);
            }
        }
    }
}

template <class S>
void quantize_fp4_rows(const Fp4Part& part) {
    part.key == 0 ? quantize_rows<S, false>(part) : quantize_rows<S, true>(part);
}

inline F32 rounded_to_bf16(F32 x) {
    alignas(64) bf16 rounded[kLanes];
    store(rounded, x);
    return load(rounded);
}

/// A part by its columns, before it is turned: the codes of two rows in the halves of a byte, and the scales of blocks.
struct Fp4Columns {
    alignas(64) std::uint8_t codes[kFp4PartRows / 2][kFp4PartCols];
    alignas(64) std::uint8_t scales[kTile][kFp4PartCols];
};

/// The amax of each column of `count` <= kStep of a block of rows, as bits.
template <class S>
inline void column_maxima(const Fp4Part& part, int row, int col, int count, std::int32_t (&amaxes)[kStep]) {
    const S* const source = static_cast<const S*>(part.source) + row * part.stride + col;
    I32 largest[4] = {splat(0), splat(0), splat(0), splat(0)};
    for (int i = 0; i < kFp4Block; ++i) {
        F32 x[4];
        load_step(source + i * part.stride, count, x);
        prefetch_step(source + (kFp4Block + i) * part.stride);  // the block below: rows far apart, of which no CPU foresees the next
        for (int v = 0; v < 4; ++v) largest[v] = max(largest[v], magnitude_of(x[v]));
    }
    for (int v = 0; v < 4; ++v) store_words(amaxes + v * kLanes, largest[v]);
    if (!part.tiled) return;
    for (int first = 0; first < kStep; first += kFp4Block) {
        std::int32_t all = 0;
        for (int c = first; c < first + kFp4Block; ++c) all = amaxes[c] > all ? amaxes[c] : all;
        for (int c = first; c < first + kFp4Block; ++c) amaxes[c] = all;
    }
}

/// `count` <= kStep columns of a block of rows.
template <class S, bool kAtRandom>
[[gnu::flatten]] inline void encode_columns(const Fp4Part& part, int row, int col, int count, Fp4Columns& out) {
    alignas(64) std::int32_t amaxes[kStep];
    alignas(64) float factors[kStep];
    column_maxima<S>(part, row, col, count, amaxes);
    const bool any_nan = scale_blocks(part, amaxes, out.scales[row / kFp4Block] + col, factors);
    F32 factor[4];
    for (int v = 0; v < 4; ++v) factor[v] = load(factors + v * kLanes);
    const S* const source = static_cast<const S*>(part.source) + row * part.stride + col;
    const std::uint64_t counter = part.counter + static_cast<std::uint64_t>(col) * part.line_counters + static_cast<std::uint64_t>(row);
    const auto encode_line = [&](int i, const I32 (&addends)[4]) {
        F32 x[4];
        load_step(source + i * part.stride, count, x);
        return encode_fp4<kAtRandom>(x, factor, addends);
    };
    for (int i = 0; i < kFp4Block; i += 4) {
        I32 addends[4][4];
        if constexpr (kAtRandom) draw_across(part, counter + static_cast<std::uint64_t>(i), addends);
        for (int j = 0; j < 4; j += 2)
            store_bytes(out.codes[(row + i + j) / 2] + col, join_nibbles(encode_line(i + j, addends[j]), encode_line(i + j + 1, addends[j + 1])));
    }
    for (int c = 0; any_nan && c < count; ++c)
        for (int i = 0; i < kFp4Block / 2 && factors[c] != factors[c]; ++i) out.codes[row / 2 + i][col + c] = kNanCodes;
}

/// Writes the first `rows` of each column of `from`, which holds `cols` <= kFp4PartCols columns, as a line of `to`.
inline void turn(const std::uint8_t (&from)[kTile][kFp4PartCols], int rows, int cols, std::uint8_t* to, std::ptrdiff_t stride) {
    for (int c = 0; c < cols; c += kTile) {
        const int count = cols - c < kTile ? cols - c : kTile;
        if (rows == kTile && count == kTile) {
            transpose_tile(from[0] + c, kFp4PartCols, to + c * stride, stride);
            continue;
        }
        alignas(64) std::uint8_t tile[kTile * kTile];
        transpose_tile(from[0] + c, kFp4PartCols, tile, kTile);
        copy_rows(tile, kTile, to + c * stride, stride, count, rows);
    }
}

template <class S, bool kAtRandom>
void quantize_columns(const Fp4Part& given) {
    const Fp4Part part = given;  // bytes that are written might be its own, as far as a compiler knows
    Fp4Columns columns;
    // Rows that the part lacks are turned along with the rest, and not copied out.
    if (part.rows < kFp4PartRows) std::memset(columns.codes, 0, sizeof columns.codes);
    std::memset(columns.scales, 0, sizeof columns.scales);
    const Ahead lines{part.codes, part.codes_stride, part.cols, 1};
    int asked = 0;
    for (int row = 0; row < part.rows; row += kFp4Block) {
        for (int col = 0; col < part.cols; col += kStep) {
            for (int i = 0; i < kStep * kFp4Block / kFp4PartRows; ++i) lines.ask(asked++);  // of a whole part all of them
            encode_columns<S, kAtRandom>(part, row, col, part.cols - col < kStep ? part.cols - col : kStep, columns);
        }
    }
    turn(columns.codes, part.rows / 2, part.cols, part.codes, part.codes_stride);
    turn(columns.scales, part.rows / kFp4Block, part.cols, part.scales, part.scales_stride);
}

template <class S>
void quantize_fp4_columns(const Fp4Part& part) {
    part.key == 0 ? quantize_columns<S, false>(part) : quantize_columns<S, true>(part);
}

/// given[j] times entries[j][i], summed over j in order from zero on.
inline void multiply(const Fp4Transform& transform, F32 (&given)[kFp4Block]) {
    F32 sums[kFp4Block];
    for (int i = 0; i < kFp4Block; ++i) {
        sums[i] = splat(0.0f);
        // Unrolled, so that what is given stays in registers.
#pragma GCC unroll 16
        for (int j = 0; j < kFp4Block; ++j) sums[i] = fma(given[j], splat(transform.entries[j][i]), sums[i]);
    }
    for (int i = 0; i < kFp4Block; ++i) given[i] = sums[i];
}

/// The same where entries[j][i] is entries[j][0] (-1)^popcount(i & j), entries[j][0] one power of two with signs: sums of pairs, of pairs of these,
/// and so on, each of places that differ in one bit, from the lowest on (Fino and Algazi 1976, doi:10.1109/TC.1976.1674569), in the order that
/// tex/formulas/nvfp4.py has. What is added has no zero with a sign, and so have no sums.
inline void multiply_by_pairs(const Fp4Transform& transform, F32 (&given)[kFp4Block]) {
    for (int j = 0; j < kFp4Block; ++j) given[j] = fma(given[j], splat(transform.entries[j][0]), splat(0.0f));
#pragma GCC unroll 4
    for (int bit = 1; bit < kFp4Block; bit *= 2) {
#pragma GCC unroll 16
        for (int j = 0; j < kFp4Block; ++j) {
            if ((j & bit) != 0) continue;
            const F32 first = given[j];
            given[j] = add(first, given[j + bit]);
            given[j + bit] = sub(first, given[j + bit]);
        }
    }
}

/// Writes `part` with its columns transformed, in blocks; returns the largest magnitude, and in `of_source` that of what is read.
template <class S>
[[gnu::flatten]] std::int32_t transform_columns(const Fp4Part& given_part, const Fp4Transform& given_transform, void* out,
                                                 std::int32_t& of_source) {
    const Fp4Part part = given_part;  // what is written might be its own, as far as a compiler knows
    const Fp4Transform transform = given_transform;
    I32 largest = splat(0);
    I32 largest_given = splat(0);
    for (int row = 0; row < part.rows; row += kFp4Block)
        for (int col = 0; col < part.cols; col += kLanes) {
            const std::ptrdiff_t first = row * part.stride + col;
            F32 given[kFp4Block];
            for (int i = 0; i < kFp4Block; ++i) {
                const F32 x = load(static_cast<const S*>(part.source) + first + i * part.stride);
                largest_given = max(largest_given, magnitude_of(x));
                given[i] = kIsBf16<S> ? x : rounded_to_bf16(x);
            }
            transform.by_pairs ? multiply_by_pairs(transform, given) : multiply(transform, given);
            for (int i = 0; i < kFp4Block; ++i) {
                bf16* const written = static_cast<bf16*>(out) + first + i * part.stride;
                store(written, given[i]);
                largest = max(largest, magnitude_of(load(written)));
            }
        }
    of_source = max_lane(largest_given);
    return max_lane(largest);
}

/// Elements of even and of odd places, one after the other.
template <class S>
inline void store_pairs(S* out, F32 even, F32 odd) {
    alignas(64) float halves[2][kLanes];
    alignas(64) float joined[2 * kLanes];
    store(halves[0], even);
    store(halves[1], odd);
    for (int i = 0; i < kLanes; ++i) {
        joined[2 * i] = halves[0][i];
        joined[2 * i + 1] = halves[1][i];
    }
    for (int v = 0; v < 2; ++v) store(out + v * kLanes, load(joined + v * kLanes));
}

/// Values that bfloat16 holds: a word of two.
inline void store_pairs(bf16* out, F32 even, F32 odd) {
    store_words(out, either(shift_right<16>(bits(even)), both(bits(odd), splat(static_cast<std::int32_t>(0xffff0000u)))));
}

/// `pairs` <= kLanes bytes of codes times the factor of each.
template <class S>
inline void decode_pairs(const std::uint8_t* codes, const float* factors, S* out, int pairs) {
    if (pairs < kLanes) {
        std::uint8_t padded[kLanes] = {};
        S values[2 * kLanes];
        std::memcpy(padded, codes, static_cast<std::size_t>(pairs));
        decode_pairs(padded, factors, values, kLanes);
        std::memcpy(static_cast<void*>(out), values, 2 * static_cast<std::size_t>(pairs) * sizeof(S));
        return;
    }
    const I32 both_codes = load_bytes(codes);
    const F32 factor = load(factors);
    store_pairs(out, mul(decode_nibbles(both_codes), factor), mul(decode_nibbles(shift_right<4>(both_codes)), factor));
}

/// `count` elements of a line, whole blocks.
template <class S>
void dequantize_fp4(const std::uint8_t* codes, const std::uint8_t* scales, void* untyped, int count) {
    constexpr int kPairs = kFp4Block / 2;
    S* const out = static_cast<S*>(untyped);
    const int blocks = count / kFp4Block;
    for (int first = 0; first < blocks; first += kLanes) {
        const int some = blocks - first < kLanes ? blocks - first : kLanes;
        std::uint8_t own[kLanes] = {};
        std::memcpy(own, scales + first, static_cast<std::size_t>(some));
        float of_blocks[kLanes];
        store(of_blocks, decode<E4M3>(load_bytes(own)));
        alignas(64) float factors[kLanes * kPairs];
        for (int i = 0; i < kLanes * kPairs; ++i) factors[i] = of_blocks[i / kPairs];
        for (int at = 0; at < some * kPairs; at += kLanes) {
            const int pairs = some * kPairs - at < kLanes ? some * kPairs - at : kLanes;
            decode_pairs(codes + first * kPairs + at, factors + at, out + 2 * (first * kPairs + at), pairs);
        }
    }
}

}  // namespace
}  // namespace fusible::cast::FUSIBLE_LEVEL
