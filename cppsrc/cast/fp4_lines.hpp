// E2M1 in blocks of 16 with an E4M3 scale each (NVFP4; NVIDIA 2025, arXiv:2509.25149), of lines that are the rows or the columns of a matrix; and back.
//
// Steps and their order are those of tex/backends/torch_backend/nvfp4_scales.py, each rounded to float: codes and scales are torch's to the bit.
#pragma once

#include "cast/e2m1.hpp"
#include "cast/runs.hpp"
#include "simd/random_words.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr int kBlockSteps = kFp4Block / kLanes;
constexpr int kSpanBlocks = 16;                          // blocks of a row whose scales are worked out together
constexpr std::uint8_t kNanCodes = 0x77;                 // two elements of a block whose factor is NaN
constexpr std::int32_t kBitsOfHalf = 0x3f000000;
static_assert(kFp4Block % kLanes == 0 && kStep % kFp4Block == 0, "a step has whole blocks, and a block whole vectors");

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

/// Of the maxima of `count` blocks, bits of floats, in whole vectors: their scales as E4M3, and the factors of their elements.
inline void scale_blocks(const Fp4Part& part, const std::int32_t* amaxes, int count, std::uint8_t* scales, float* factors) {
    std::int32_t largest = bits_of(part.from_amax) & 0x7fffffff;
    for (int i = 0; i < count; ++i) largest = amaxes[i] > largest ? amaxes[i] : largest;
    if (largest > kInfinityBits) {  // a NaN
        for (int i = 0; i < count; ++i) {
            scales[i] = encode_one<E4M3>(float_of(amaxes[i]) * part.from_amax) & 0x7f;
            factors[i] = factor_of(value_of_e4m3(scales[i]), part.from_scale);
        }
        return;
    }
    I32 unused = splat(0);
    for (int i = 0; i < count; i += kLanes) {
        const I32 code = encode<E4M3>(floats(load_words(amaxes + i)), splat(part.from_amax), unused);
        std::int32_t codes[kLanes];
        store_words(codes, code);
        for (int lane = 0; lane < kLanes; ++lane) scales[i + lane] = static_cast<std::uint8_t>(codes[lane] & 0x7f);
        const F32 quotient = div(splat(1.0f), mul(decode<E4M3>(both(code, splat(0x7f))), splat(part.from_scale)));
        store(factors + i, min(quotient, splat(3.40282347e+38f)));
    }
}

/// The word of each lane's counter as a number in [0, 1), by its upper 24 bits.
inline F32 drawn(std::uint64_t key, std::uint64_t counter, std::uint64_t step) {
    return mul(from_int(shift_right<8>(random_words(key, counter, step))), splat(0x1p-24f));
}

/// Codes of x * factor, rounded to one of their two neighbours: up in size where `random` is below the place between them.
inline I32 encode_stochastically(F32 x, F32 factor, F32 random) {
    const I32 size = bits(mul(floats(magnitude_of(x)), factor));
    // From 1 on, the exponent and a bit of the mantissa count the numbers of the format; below lie 0 and a half.
    const I32 counted = min(add(shift_right<22>(size), splat(std::int32_t{-252})), splat(std::int32_t{E2M1::kLastFinite}));
    const I32 code = max(counted, where_above(size, kBitsOfHalf - 1, 1));
    const F32 from_one = floats(both(size, splat(static_cast<std::int32_t>(0xffc00000u))));
    const F32 lower = select_less(floats(size), splat(1.0f), select_less(floats(size), splat(0.5f), splat(0.0f), splat(0.5f)), from_one);
    const F32 steps = select_less(lower, splat(2.0f), splat(2.0f), select_less(lower, splat(4.0f), splat(1.0f), splat(0.5f)));
    const F32 place = mul(sub(floats(size), lower), steps);
    const I32 up = round_to_int(select_less(random, place, splat(1.0f), splat(0.0f)));
    return nibbles(min(add(code, up), splat(std::int32_t{E2M1::kLastFinite})), bits(x));
}

/// Codes, in four bits, of elements whose counters are `step` apart.
inline I32 encode_fp4(const Fp4Part& part, F32 x, F32 factor, std::uint64_t counter, std::uint64_t step) {
    if (part.key == 0) return nibbles(encode_magnitude<E2M1>(magnitude_of(x), factor), bits(x));
    return encode_stochastically(x, factor, drawn(part.key, counter, step));
}

/// The amax of every square of kFp4Block blocks of a line each, given to each of its lines.
inline void spread_over_lines(std::int32_t (&amaxes)[kFp4Block][kSpanBlocks]) {
    for (int b = 0; b < kSpanBlocks; ++b) {
        std::int32_t largest = 0;
        for (int line = 0; line < kFp4Block; ++line) largest = amaxes[line][b] > largest ? amaxes[line][b] : largest;
        for (int line = 0; line < kFp4Block; ++line) amaxes[line][b] = largest;
    }
}

/// The codes of `count` <= kStep elements, two to a byte.
inline void store_halves(std::uint8_t* out, const I32 (&codes)[4], int count) {
    if (count == kStep) return store_nibbles(out, codes);
    std::uint8_t padded[kStep / 2];
    store_nibbles(padded, codes);
    std::memcpy(out, padded, static_cast<std::size_t>(count / 2));
}

/// The codes of a row in a span of blocks.
template <class S>
inline void encode_row(const Fp4Part& part, int row, int col, int blocks, const float* factors) {
    const S* const source = static_cast<const S*>(part.source) + row * part.stride + col;
    std::uint8_t* const codes = part.codes + row * part.codes_stride + col / 2;
    const std::uint64_t counter = part.counter + static_cast<std::uint64_t>(row) * part.line_counters + static_cast<std::uint64_t>(col);
    const int width = blocks * kFp4Block;
    for (int c = 0; c < width; c += kStep) {
        I32 step[4];
        for (int v = 0; v < 4; ++v) {
            const int at = c + v * kLanes;
            const F32 x = at < width ? load(source + at) : splat(0.0f);
            const float factor = at < width ? factors[at / kFp4Block] : 1.0f;
            step[v] = encode_fp4(part, x, splat(factor), counter + static_cast<std::uint64_t>(at), 1);
        }
        store_halves(codes + c / 2, step, width - c < kStep ? width - c : kStep);
    }
    for (int b = 0; b < blocks; ++b)
        if (factors[b] != factors[b]) std::memset(codes + b * kFp4Block / 2, kNanCodes, kFp4Block / 2);
}

/// The amax of each block of a row in a span, as bits.
template <class S>
inline void block_maxima(const S* source, int blocks, std::int32_t* amaxes) {
    for (int first = 0; first < blocks; first += kLanes) {
        I32 largest[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            largest[i] = splat(0);
            const S* const block = source + (first + i) * kFp4Block;
            for (int v = 0; v < kBlockSteps && first + i < blocks; ++v) largest[i] = max(largest[i], magnitude_of(load(block + v * kLanes)));
        }
        store_words(amaxes + first, largest_of_each(largest));
    }
}

template <class S>
void quantize_fp4_rows(const Fp4Part& given) {
    const Fp4Part part = given;  // bytes that are written might be its own, as far as a compiler knows
    constexpr int kSpan = kSpanBlocks * kFp4Block;
    for (int first = 0; first < part.rows; first += kFp4Block) {
        for (int col = 0; col < part.cols; col += kSpan) {
            const int blocks = part.cols - col < kSpan ? (part.cols - col) / kFp4Block : kSpanBlocks;
            alignas(64) std::int32_t amaxes[kFp4Block][kSpanBlocks] = {};
            for (int line = 0; line < kFp4Block; ++line)
                block_maxima(static_cast<const S*>(part.source) + (first + line) * part.stride + col, blocks, amaxes[line]);
            if (part.tiled) spread_over_lines(amaxes);
            for (int line = 0; line < kFp4Block; ++line) {
                std::uint8_t scales[kSpanBlocks];
                float factors[kSpanBlocks];
                scale_blocks(part, amaxes[line], kSpanBlocks, scales, factors);
                std::memcpy(part.scales + (first + line) * part.scales_stride + col / kFp4Block, scales, static_cast<std::size_t>(blocks));
                encode_row<S>(part, first + line, col, blocks, factors);
            }
        }
    }
}

inline F32 rounded_to_bf16(F32 x) {
    alignas(64) bf16 rounded[kLanes];
    store(rounded, x);
    return load(rounded);
}

inline I32 largest_of(const F32 (&x)[kFp4Block]) {
    I32 largest = splat(0);
    for (const F32& each : x) largest = max(largest, magnitude_of(each));
    return largest;
}

/// The codes of eight elements as a word, the first in its lowest bits.
inline I32 joined_codes(const I32* codes) {
    I32 bytes[4];
    for (int i = 0; i < 4; ++i) bytes[i] = either(codes[2 * i], shift_left<4>(codes[2 * i + 1]));
    return either(either(bytes[0], shift_left<8>(bytes[1])), shift_left<16>(either(bytes[2], shift_left<8>(bytes[3]))));
}

inline void store_codes(std::uint8_t* out, const std::int32_t* word) {
    for (int i = 0; i < 4; ++i) out[i] = static_cast<std::uint8_t>(static_cast<std::uint32_t>(*word) >> (8 * i));
}

/// A square of kFp4Block rows and columns, by its columns.
template <class S>
inline void encode_columns_of_square(const Fp4Part& part, int row, int col) {
    F32 x[kBlockSteps][kFp4Block];
    alignas(64) std::int32_t amaxes[kFp4Block];
    for (int v = 0; v < kBlockSteps; ++v) {
        const S* const source = static_cast<const S*>(part.source) + row * part.stride + col + v * kLanes;
        for (int i = 0; i < kFp4Block; ++i) {
            x[v][i] = load(source + i * part.stride);
            __builtin_prefetch(source + (kFp4Block + i) * part.stride);  // the square below: lines far apart, of which no CPU foresees the next
        }
        store_words(amaxes + v * kLanes, largest_of(x[v]));
    }
    if (part.tiled) {
        std::int32_t largest = 0;
        for (const std::int32_t amax : amaxes) largest = amax > largest ? amax : largest;
        for (std::int32_t& amax : amaxes) amax = largest;
    }
    std::uint8_t scales[kFp4Block];
    alignas(64) float factors[kFp4Block];
    alignas(64) std::int32_t words[2][kFp4Block];
    scale_blocks(part, amaxes, kFp4Block, scales, factors);
    const std::uint64_t counter = part.counter + static_cast<std::uint64_t>(col) * part.line_counters + static_cast<std::uint64_t>(row);
    for (int v = 0; v < kBlockSteps; ++v) {
        I32 codes[kFp4Block];
        for (int i = 0; i < kFp4Block; ++i) {
            const std::uint64_t own = counter + static_cast<std::uint64_t>(v * kLanes) * part.line_counters + static_cast<std::uint64_t>(i);
            codes[i] = encode_fp4(part, x[v][i], load(factors + v * kLanes), own, part.line_counters);
        }
        for (int half = 0; half < 2; ++half) store_words(words[half] + v * kLanes, joined_codes(codes + 8 * half));
    }
    for (int c = 0; c < kFp4Block; ++c) {
        std::uint8_t* const out = part.codes + (col + c) * part.codes_stride + row / 2;
        for (int half = 0; half < 2; ++half) store_codes(out + 4 * half, words[half] + c);
        if (factors[c] != factors[c]) std::memset(out, kNanCodes, kFp4Block / 2);
        part.scales[(col + c) * part.scales_stride + row / kFp4Block] = scales[c];
    }
}

template <class S>
void quantize_fp4_columns(const Fp4Part& given) {
    const Fp4Part part = given;  // bytes that are written might be its own, as far as a compiler knows
    for (int col = 0; col < part.cols; col += kFp4Block)
        for (int row = 0; row < part.rows; row += kFp4Block) encode_columns_of_square<S>(part, row, col);
}

/// Writes `part` with its columns transformed, in blocks, by `transform` [kFp4Block, kFp4Block]; returns the largest magnitude.
template <class S>
std::int32_t transform_columns(const Fp4Part& part, const float* transform, void* out) {
    I32 largest = splat(0);
    for (int row = 0; row < part.rows; row += kFp4Block)
        for (int col = 0; col < part.cols; col += kLanes) {
            const std::ptrdiff_t first = row * part.stride + col;
            F32 given[kFp4Block];
            for (int i = 0; i < kFp4Block; ++i) {
                const F32 x = load(static_cast<const S*>(part.source) + first + i * part.stride);
                given[i] = kIsBf16<S> ? x : rounded_to_bf16(x);
            }
            for (int i = 0; i < kFp4Block; ++i) {
                F32 sum = splat(0.0f);
                // Unrolled, so that what is given stays in registers.
#pragma GCC unroll 16
                for (int j = 0; j < kFp4Block; ++j) sum = fma(given[j], splat(transform[j * kFp4Block + i]), sum);
                bf16* const written = static_cast<bf16*>(out) + first + i * part.stride;
                store(written, sum);
                largest = max(largest, magnitude_of(load(written)));
            }
        }
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
