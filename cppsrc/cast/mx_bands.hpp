// Blocks of 32 elements with an exponent each, along rows and along columns, from one read of a band of 32 rows; and back.
#pragma once

#include "cast/exponents.hpp"
#include "cast/halves.hpp"
#include "cast/strips.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr int kStepVectors = kStep / kLanes;
constexpr int kStepBlocks = kStep / kMxBlock;
constexpr int kBlockVectors = kMxBlock / kLanes;
constexpr int kBlockHalves = kMxBlock / (2 * kLanes);
static_assert(kStep % kMxBlock == 0, "a step has whole blocks");

/// The factor of E8M0's definition: 1 over the largest number of the format, as torch rounds it.
template <class F>
inline float inverse_largest() {
    return static_cast<float>(1.0 / static_cast<double>(float_of(F::kMaxBits)));
}

template <class Codes>
inline void store_step(std::uint8_t* out, const Codes& codes, int width) {
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

/// A step of a band: its values, and the largest magnitudes of its blocks along rows and along columns, as bits. Columns that it lacks are zeros.
template <class V>
struct MxStep {
    alignas(64) V values[kMxBlock][kStep];
    alignas(64) std::int32_t of_rows[kStepBlocks][kMxBlock];
    alignas(64) std::int32_t of_columns[kStep];
};

/// Asks for what the next step reads of a row, and for the lines that it writes.
template <class S>
inline void prefetch_next(const MxBand& band, const S* source, int r, int c) {
    prefetch_step(source + kStep);
    if (band.codes != nullptr) __builtin_prefetch(band.codes + r * band.stride + c + kStep, 1, 2);
    if (band.column_codes != nullptr) __builtin_prefetch(band.column_codes + r * band.stride + c + kStep, 1, 2);
}

/// What the values of a step are held as.
template <class S>
struct HeldAs {
    using Type = float;
};
template <>
struct HeldAs<bf16> {
    using Type = bf16;
};

/// Reads `width` <= kStep columns of a band from column c on; returns the largest magnitude.
template <class S>
inline std::int32_t read_step(const MxBand& band, int c, int width, MxStep<float>& step) {
    I32 columns[kStepVectors];
    for (int v = 0; v < kStepVectors; ++v) columns[v] = splat(0);
    for (int first = 0; first < kMxBlock; first += kLanes) {
        I32 rows[kStepBlocks][kLanes];
        for (int i = 0; i < kLanes; ++i) {
            const int r = first + i;
            const S* source = static_cast<const S*>(band.source) + r * band.stride + c;
            prefetch_next(band, source, r, c);
            for (int b = 0; b < kStepBlocks; ++b) {
                rows[b][i] = splat(0);
                for (int v = b * kBlockVectors; v < (b + 1) * kBlockVectors; ++v) {
                    const F32 x = v * kLanes < width ? load(source + v * kLanes) : splat(0.0f);
                    const I32 magnitude = magnitude_of(x);
                    store(step.values[r] + v * kLanes, x);
                    rows[b][i] = max(rows[b][i], magnitude);
                    columns[v] = max(columns[v], magnitude);
                }
            }
        }
        for (int b = 0; b < kStepBlocks; ++b) store_words(step.of_rows[b] + first, largest_of_each(rows[b]));
    }
    I32 largest = splat(0);
    for (int v = 0; v < kStepVectors; ++v) {
        store_words(step.of_columns + v * kLanes, columns[v]);
        largest = max(largest, columns[v]);
    }
    return max_lane(largest);
}

template <class S>
inline std::int32_t read_step(const MxBand& band, int c, int width, MxStep<bf16>& step) {
    U16 columns[kStepHalves];
    for (int v = 0; v < kStepHalves; ++v) columns[v] = splat(std::uint16_t{0});
    for (int first = 0; first < kMxBlock; first += kLanes) {
        I32 rows[kStepBlocks][kLanes];
        for (int i = 0; i < kLanes; ++i) {
            const int r = first + i;
            const bf16* source = static_cast<const bf16*>(band.source) + r * band.stride + c;
            prefetch_next(band, source, r, c);
            for (int b = 0; b < kStepBlocks; ++b) {
                U16 row = splat(std::uint16_t{0});
                for (int v = b * kBlockHalves; v < (b + 1) * kBlockHalves; ++v) {
                    const U16 x = v * 2 * kLanes < width ? load_halves(source + v * 2 * kLanes) : splat(std::uint16_t{0});
                    const U16 magnitude = both(x, splat(std::uint16_t{0x7fff}));
                    store_halves(step.values[r] + v * 2 * kLanes, x);
                    row = max(row, magnitude);
                    columns[v] = max(columns[v], magnitude);
                }
                rows[b][i] = larger_of_pairs(row);
            }
        }
        for (int b = 0; b < kStepBlocks; ++b) store_words(step.of_rows[b] + first, largest_of_each(rows[b]));
    }
    return store_magnitudes(columns, step.of_columns);
}

/// The largest magnitude of a square in the place of those of its lines.
template <class V>
inline void spread_over_squares(MxStep<V>& step) {
    for (int b = 0; b < kStepBlocks; ++b) {
        std::int32_t largest = 0;
        for (const std::int32_t magnitude : step.of_rows[b]) largest = magnitude > largest ? magnitude : largest;
        for (int i = 0; i < kMxBlock; ++i) step.of_rows[b][i] = step.of_columns[b * kMxBlock + i] = largest;
    }
}

/// Exponents of blocks without NaN, by the largest magnitudes in them.
template <class F>
inline I32 exponents_of(const std::int32_t* magnitudes) {
    return exponent_above(bits(mul(floats(load_words(magnitudes)), splat(inverse_largest<F>()))));
}

/// By what the elements of a step are multiplied, also as they are cast in halves.
struct MxFactors {
    alignas(64) float of_rows[kStepBlocks][kMxBlock] = {};
    F32 of_columns[kStepVectors];
    HalfScales<kMxBlock> halves_of_rows[kStepBlocks] = {};
    HalfScales<kStep> halves_of_columns;
};

/// The exponent, as floats have it, of the factor that goes with a block's exponent.
inline I32 exponent_before(I32 code) { return add(exclusive_or(code, splat(0xff)), splat(-1)); }

/// Writes the exponents of a step's blocks along rows, and finds the factors of their elements.
template <class F, class V>
inline void scale_rows(const MxBand& band, int c, int width, const MxStep<V>& step, MxFactors& factors) {
    alignas(64) std::int32_t exponents[kMxBlock];
    for (int b = 0; b * kMxBlock < width; ++b) {
        for (int r = 0; r < kMxBlock; r += kLanes) {
            const I32 of_rows = exponents_of<F>(step.of_rows[b] + r);
            store_words(exponents + r, of_rows);
            store(factors.of_rows[b] + r, factor_before(of_rows));
            if constexpr (kIsBf16<V>) set_scales<F>(factors.halves_of_rows[b], r, exponent_before(of_rows));
        }
        std::uint8_t* const out = band.exponents + c / kMxBlock + b;
        for (int r = 0; r < kMxBlock; ++r) out[r * band.exponents_stride] = static_cast<std::uint8_t>(exponents[r]);
    }
}

/// Writes the exponents of a step's columns, and finds the factors of their elements.
template <class F, class V>
inline void scale_columns(const MxBand& band, int c, int width, const MxStep<V>& step, MxFactors& factors) {
    I32 exponents[kStepVectors];
    for (int v = 0; v < kStepVectors; ++v) {
        exponents[v] = exponents_of<F>(step.of_columns + v * kLanes);
        factors.of_columns[v] = factor_before(exponents[v]);
        if constexpr (kIsBf16<V>) set_scales<F>(factors.halves_of_columns, v * kLanes, exponent_before(exponents[v]));
    }
    store_step(band.column_exponents + c, exponents, width);
}

/// Row r of a step.
template <class F, bool kRows, bool kColumns, class V>
[[gnu::flatten]] inline void encode_row(const MxBand& band, int r, int c, int width, const MxStep<V>& step, const MxFactors& factors) {
    F32 x[kStepVectors];
    F32 of_rows[kStepVectors];
    I32 unused[kStepVectors] = {};
    for (int v = 0; v < kStepVectors; ++v) {
        x[v] = load(step.values[r] + v * kLanes);
        of_rows[v] = splat(factors.of_rows[v / kBlockVectors][r]);
    }
    Bytes codes = encode<F>(x, of_rows, unused);
    if constexpr (kRows) store_step(band.codes + r * band.stride + c, codes, width);
    if constexpr (kColumns) {
        if (!kRows || !band.tiled) codes = encode<F>(x, factors.of_columns, unused);  // the codes of a square are the same in both copies
        store_step(band.column_codes + r * band.stride + c, codes, width);
    }
}

/// Apart from the loop that rarely comes here, which it would take registers from.
template <class F, bool kRows, bool kColumns>
[[gnu::noinline]] void encode_again(const MxBand& band, int r, int c, int width, const MxStep<bf16>& step, const MxFactors& factors) {
    encode_row<F, kRows, kColumns>(band, r, c, width, step, factors);
}

/// Row r of a step of bf16; returns whether it is to be encoded again as floats.
template <class F, bool kRows, bool kColumns>
inline bool encode_row_halves(const MxBand& band, int r, int c, int width, const MxStep<bf16>& step, const MxFactors& factors) {
    U16 missed = splat(std::uint16_t{0});
    Halves x[kStepHalves];
    U16 codes[kStepHalves];
    for (int v = 0; v < kStepHalves; ++v) x[v] = Halves::of<F>(load_halves(step.values[r] + v * 2 * kLanes));
    if constexpr (kRows) {
        for (int v = 0; v < kStepHalves; ++v) {
            const auto& scales = factors.halves_of_rows[v / kBlockHalves];
            codes[v] = x[v].template codes<F>(splat(scales.offset[r]), splat(scales.limit[r]), missed);
        }
        store_step(band.codes + r * band.stride + c, codes, width);
    }
    if constexpr (kColumns) {
        if (!kRows || !band.tiled) {
            for (int v = 0; v < kStepHalves; ++v) {
                const int i = v * 2 * kLanes;
                const auto& scales = factors.halves_of_columns;
                codes[v] = x[v].template codes<F>(load_halves(scales.offset + i), load_halves(scales.limit + i), missed);
            }
        }
        store_step(band.column_codes + r * band.stride + c, codes, width);
    }
    return any(missed);
}

template <class F, bool kRows, bool kColumns, class V>
inline void encode_step(const MxBand& band, int c, int width, const MxStep<V>& step, Trials& trials) {
    MxFactors factors;
    if constexpr (kRows) scale_rows<F>(band, c, width, step, factors);
    if constexpr (kColumns) scale_columns<F>(band, c, width, step, factors);
    if constexpr (kIsBf16<V>) {
        if (trials.is_due()) {
            int missed = 0;
            for (int r = 0; r < kMxBlock; ++r) {
                if (!encode_row_halves<F, kRows, kColumns>(band, r, c, width, step, factors)) continue;
                encode_again<F, kRows, kColumns>(band, r, c, width, step, factors);
                ++missed;
            }
            return trials.note(missed, kMxBlock);
        }
    }
    for (int r = 0; r < kMxBlock; ++r) encode_row<F, kRows, kColumns>(band, r, c, width, step, factors);
}

/// Again, for the blocks that have a NaN.
template <class F, class V>
inline void encode_nans(const MxBand& band, int c, int width, const MxStep<V>& step) {
    for (int r = 0; r < kMxBlock; ++r) {
        for (int i = 0; i < width; ++i) {
            if (band.codes != nullptr && step.of_rows[i / kMxBlock][r] > kInfinityBits) {
                band.exponents[r * band.exponents_stride + (c + i) / kMxBlock] = static_cast<std::uint8_t>(kNanExponent);
                band.codes[r * band.stride + c + i] = encode_nan<F>(to_float(step.values[r][i]));
            }
            if (band.column_codes != nullptr && step.of_columns[i] > kInfinityBits) {
                band.column_exponents[c + i] = static_cast<std::uint8_t>(kNanExponent);
                band.column_codes[r * band.stride + c + i] = encode_nan<F>(to_float(step.values[r][i]));
            }
        }
    }
}

template <class S, class F>
void quantize_mx(const MxBand& band) {
    MxStep<typename HeldAs<S>::Type> step;
    Trials trials;
    for (int c = 0; c < band.cols; c += kStep) {
        const int width = band.cols - c < kStep ? band.cols - c : kStep;
        const std::int32_t largest = read_step<S>(band, c, width, step);
        if (band.tiled) spread_over_squares(step);
        if (band.column_codes == nullptr)
            encode_step<F, true, false>(band, c, width, step, trials);
        else if (band.codes == nullptr)
            encode_step<F, false, true>(band, c, width, step, trials);
        else
            encode_step<F, true, true>(band, c, width, step, trials);
        if (largest > kInfinityBits) encode_nans<F>(band, c, width, step);
    }
}

/// The magnitudes of values that are not zero: products of two that lie within 2^-kPlainExponent .. 2^kPlainExponent are normal floats.
struct Magnitudes {
    I32 least = splat(std::int32_t{0x7fffffff});
    I32 most = splat(0);

    void add(F32 x) {
        const I32 magnitude = magnitude_of(x);
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
