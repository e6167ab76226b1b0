// Blocks of 32 elements with an exponent each, along rows and along columns, from one read of a band of 32 rows; and back.
#pragma once

#include "cast/exponents.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr int kStepVectors = kStep / kLanes;
constexpr int kBlockVectors = kMxBlock / kLanes;
static_assert(kStep % kMxBlock == 0, "a step has whole blocks");

/// The factor of E8M0's definition: 1 over the largest number of the format, as torch rounds it.
template <class F>
inline float inverse_largest() {
    return static_cast<float>(1.0 / static_cast<double>(float_of(F::kMaxBits)));
}

inline void store_step(std::uint8_t* out, const I32 (&codes)[4], int width) {
    if (width == kStep) return store_bytes(out, codes);
    std::uint8_t padded[kStep];
    store_bytes(padded, codes);
    std::memcpy(out, padded, static_cast<std::size_t>(width));
}

/// A block with a NaN: all of its elements are NaN, and those that were keep their signs.
template <class F>
inline std::uint8_t encode_nan(float x) {
    return encode_one<F>(x != x ? x : float_of(kQuietNan));
}

/// `width` <= kStep columns of a band, from column c on: codes and exponents along rows; and where columns are wanted, the values and the maxima of each
/// column.
template <class S, class F, bool kColumns>
inline void encode_rows(const MxBand& band, int c, int width, float (*values)[kStep], I32 (&column_amax)[kStepVectors]) {
    const float inverse = inverse_largest<F>();
    const I32 mask = splat(std::int32_t{0x7fffffff});
    for (int r = 0; r < kMxBlock; ++r) {
        const S* source = static_cast<const S*>(band.source) + r * band.stride + c;
        F32 x[kStepVectors];
        I32 magnitude[kStepVectors];
        for (int v = 0; v < kStepVectors; ++v) {
            x[v] = v * kLanes < width ? load(source + v * kLanes) : splat(0.0f);
            magnitude[v] = both(bits(x[v]), mask);
            if constexpr (kColumns) {
                store(values[r] + v * kLanes, x[v]);
                column_amax[v] = max(column_amax[v], magnitude[v]);
            }
        }
        if (band.codes == nullptr) continue;
        I32 codes[kStepVectors];
        I32 unused = splat(0);
        bool has_nan = false;
        for (int b = 0; b * kMxBlock < width; ++b) {
            I32 largest = magnitude[b * kBlockVectors];
            for (int v = 1; v < kBlockVectors; ++v) largest = max(largest, magnitude[b * kBlockVectors + v]);
            const std::int32_t amax = max_lane(largest);
            const std::int32_t exponent = amax > kInfinityBits ? kNanExponent : exponent_above(bits_of(float_of(amax) * inverse));
            band.exponents[r * band.exponents_stride + c / kMxBlock + b] = static_cast<std::uint8_t>(exponent);
            has_nan = has_nan || exponent == kNanExponent;
            const F32 factor = splat(exponent == kNanExponent ? 1.0f : factor_before(exponent));
            for (int v = b * kBlockVectors; v < (b + 1) * kBlockVectors; ++v) codes[v] = encode<F>(x[v], factor, unused);
        }
        for (int v = width / kLanes; v < kStepVectors; ++v) codes[v] = splat(0);
        std::uint8_t* out = band.codes + r * band.stride + c;
        store_step(out, codes, width);
        if (!has_nan) continue;
        for (int i = 0; i < width; ++i)
            if (band.exponents[r * band.exponents_stride + (c + i) / kMxBlock] == kNanExponent) out[i] = encode_nan<F>(to_float(source[i]));
    }
}

template <class F>
inline void encode_columns(const MxBand& band, int c, int width, const float (*values)[kStep], const I32 (&column_amax)[kStepVectors]) {
    const F32 inverse = splat(inverse_largest<F>());
    I32 exponents[kStepVectors];
    F32 factors[kStepVectors];
    I32 largest = splat(0);
    for (int v = 0; v < kStepVectors; ++v) {
        largest = max(largest, column_amax[v]);
        exponents[v] = exponent_above(bits(mul(floats(column_amax[v]), inverse)));
        factors[v] = factor_before(exponents[v]);
    }
    store_step(band.column_exponents + c, exponents, width);
    I32 unused = splat(0);
    for (int r = 0; r < kMxBlock; ++r) {
        I32 codes[kStepVectors];
        for (int v = 0; v < kStepVectors; ++v) codes[v] = encode<F>(load(values[r] + v * kLanes), factors[v], unused);
        store_step(band.column_codes + r * band.stride + c, codes, width);
    }
    if (max_lane(largest) <= kInfinityBits) return;
    for (int i = 0; i < width; ++i) {  // again, for the columns that have a NaN
        bool has_nan = false;
        for (int r = 0; r < kMxBlock; ++r) has_nan = has_nan || values[r][i] != values[r][i];
        if (!has_nan) continue;
        band.column_exponents[c + i] = static_cast<std::uint8_t>(kNanExponent);
        for (int r = 0; r < kMxBlock; ++r) band.column_codes[r * band.stride + c + i] = encode_nan<F>(values[r][i]);
    }
}

/// One exponent for each square: both copies have the same codes.
template <class S, class F>
inline void encode_squares(const MxBand& band, int c, int width) {
    const S* const source = static_cast<const S*>(band.source) + c;
    const I32 mask = splat(std::int32_t{0x7fffffff});
    I32 largest[kStepVectors];
    for (int v = 0; v < kStepVectors; ++v) largest[v] = splat(0);
    for (int r = 0; r < kMxBlock; ++r)
        for (int v = 0; v * kLanes < width; ++v) largest[v] = max(largest[v], both(bits(load(source + r * band.stride + v * kLanes)), mask));
    std::int32_t exponents[kStep / kMxBlock] = {};
    bool has_nan = false;
    for (int b = 0; b * kMxBlock < width; ++b) {
        I32 of_square = largest[b * kBlockVectors];
        for (int v = 1; v < kBlockVectors; ++v) of_square = max(of_square, largest[b * kBlockVectors + v]);
        const std::int32_t amax = max_lane(of_square);
        exponents[b] = amax > kInfinityBits ? kNanExponent : exponent_above(bits_of(float_of(amax) * inverse_largest<F>()));
        has_nan = has_nan || exponents[b] == kNanExponent;
        if (band.column_exponents != nullptr) std::memset(band.column_exponents + c + b * kMxBlock, exponents[b], kMxBlock);
    }
    I32 unused = splat(0);
    for (int r = 0; r < kMxBlock; ++r) {
        I32 codes[kStepVectors];
        for (int v = 0; v < kStepVectors; ++v) {
            const std::int32_t exponent = exponents[v / kBlockVectors];
            const F32 x = v * kLanes < width ? load(source + r * band.stride + v * kLanes) : splat(0.0f);
            codes[v] = encode<F>(x, splat(exponent == kNanExponent ? 1.0f : factor_before(exponent)), unused);
        }
        alignas(64) std::uint8_t bytes[kStep];
        store_bytes(bytes, codes);
        for (int i = 0; has_nan && i < width; ++i)
            if (exponents[i / kMxBlock] == kNanExponent) bytes[i] = encode_nan<F>(to_float(source[r * band.stride + i]));
        if (band.codes != nullptr) std::memcpy(band.codes + r * band.stride + c, bytes, static_cast<std::size_t>(width));
        if (band.column_codes != nullptr) std::memcpy(band.column_codes + r * band.stride + c, bytes, static_cast<std::size_t>(width));
        for (int b = 0; band.exponents != nullptr && b * kMxBlock < width; ++b)
            band.exponents[r * band.exponents_stride + c / kMxBlock + b] = static_cast<std::uint8_t>(exponents[b]);
    }
}

template <class S, class F>
void quantize_mx(const MxBand& band) {
    alignas(64) float values[kMxBlock][kStep];
    for (int c = 0; c < band.cols; c += kStep) {
        const int width = band.cols - c < kStep ? band.cols - c : kStep;
        I32 column_amax[kStepVectors];
        for (int v = 0; v < kStepVectors; ++v) column_amax[v] = splat(0);
        if (band.tiled) {
            encode_squares<S, F>(band, c, width);
        } else if (band.column_codes == nullptr) {
            encode_rows<S, F, false>(band, c, width, nullptr, column_amax);
        } else {
            encode_rows<S, F, true>(band, c, width, values, column_amax);
            encode_columns<F>(band, c, width, values, column_amax);
        }
    }
}

/// The magnitudes of values that are not zero: products of two that lie within 2^-kPlainExponent .. 2^kPlainExponent are normal floats.
struct Magnitudes {
    I32 least = splat(std::int32_t{0x7fffffff});
    I32 most = splat(0);

    void add(F32 x) {
        const I32 magnitude = both(bits(x), splat(std::int32_t{0x7fffffff}));
        const I32 where_zero = exclusive_or(where_above(magnitude, 0, 0x7fffffff), splat(std::int32_t{0x7fffffff}));
        least = min(least, either(magnitude, where_zero));
        most = max(most, magnitude);
    }

    bool are_plain() const {
        const I32 flipped = exclusive_or(least, splat(std::int32_t{0x7fffffff}));
        const std::int32_t lowest = max_lane(flipped) ^ 0x7fffffff;
        return lowest >= (127 - kPlainExponent) << 23 && max_lane(most) <= (127 + kPlainExponent) << 23;
    }
};

template <class F, class S>
bool dequantize_mx(const MxCodes& band, void* untyped) {
    Magnitudes seen;
    for (int r = 0; r < band.rows; ++r) {
        const std::uint8_t* codes = band.codes + r * band.stride;
        const std::uint8_t* exponents = band.exponents + (band.along_rows ? r * band.exponents_stride : 0);
        S* out = static_cast<S*>(untyped) + r * band.stride;
        for (int c = 0; c < band.cols; c += kMxBlock) {
            const F32 of_block = splat(band.along_rows ? power_of(std::int32_t{exponents[c / kMxBlock]}) : 1.0f);
            for (int i = c; i < c + kMxBlock; i += kLanes) {
                const F32 factor = band.along_rows ? of_block : power_of(load_bytes(exponents + i));
                const F32 value = mul(decode<F>(load_bytes(codes + i)), factor);
                seen.add(value);
                store(out + i, value);
            }
        }
    }
    return seen.are_plain();
}

}  // namespace
}  // namespace fusible::cast::FUSIBLE_LEVEL
