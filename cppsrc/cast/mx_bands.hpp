// Blocks of 32 elements with an exponent each, along rows and along columns, by two passes over a band of 32 rows; and back.
#pragma once

#include "cast/exponents.hpp"
#include "cast/halves.hpp"
#include "cast/strips.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr int kStepVectors = kStep / kLanes;
constexpr int kMxBandBlocks = kMxBandCols / kMxBlock;
static_assert(kStep % kMxBlock == 0 && kMxBlock % (2 * kLanes) == 0, "a step has whole blocks, and a block whole vectors");
static_assert(kMxBandBlocks % kLanes == 0 && kMxBandCols % kStep == 0, "a band has whole vectors of blocks, and whole steps");

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

/// The largest magnitudes, as bits, of a band's blocks along rows and along columns.
struct MxMaxima {
    alignas(64) std::int32_t of_rows[kMxBlock][kMxBandBlocks];
    alignas(64) std::int32_t of_columns[kMxBandCols];
    alignas(64) std::uint16_t halves_of_columns[kMxBandCols];  // of bf16, as it lies, while it is read
};

template <class S>
inline const S* row_of(const MxBand& band, int r) {
    return static_cast<const S*>(band.source) + r * band.stride;
}

/// The largest magnitudes of a block of a row, by lanes; those of its columns are raised where they are asked for.
template <bool kColumns, class S>
inline I32 read_block(const S* source, std::int32_t* columns) {
    I32 largest = splat(0);
    for (int i = 0; i < kMxBlock; i += kLanes) {
        const I32 magnitude = magnitude_of(load(source + i));
        largest = max(largest, magnitude);
        if constexpr (kColumns) store_words(columns + i, max(load_words(columns + i), magnitude));
    }
    return largest;
}

template <bool kColumns>
inline I32 read_block(const bf16* source, std::uint16_t* columns) {
    U16 largest = splat(std::uint16_t{0});
    for (int i = 0; i < kMxBlock; i += 2 * kLanes) {
        const U16 magnitude = both(load_halves(source + i), splat(std::uint16_t{0x7fff}));
        largest = max(largest, magnitude);
        if constexpr (kColumns) store_halves(columns + i, max(load_halves(columns + i), magnitude));
    }
    return larger_of_pairs(largest);
}

/// The first pass over a band, row by row, for which a CPU fetches ahead by itself; the second finds it in the cache.
template <bool kColumns, class S>
[[gnu::flatten]] inline void read_band(const MxBand& band, MxMaxima& maxima) {
    const int blocks = band.cols / kMxBlock;
    auto* const columns = [&] {
        if constexpr (kIsBf16<S>)
            return maxima.halves_of_columns;
        else
            return maxima.of_columns;
    }();
    if constexpr (kColumns) std::memset(columns, 0, sizeof *columns * kMxBandCols);
    for (int r = 0; r < kMxBlock; ++r) {
        const S* const source = row_of<S>(band, r);
        for (int first = 0; first < blocks; first += kLanes) {
            I32 largest[kLanes];
            for (int b = 0; b < kLanes; ++b) {
                const int c = (first + b) * kMxBlock;
                largest[b] = first + b < blocks ? read_block<kColumns>(source + c, columns + c) : splat(0);
            }
            store_words(maxima.of_rows[r] + first, largest_of_each(largest));
        }
    }
    if constexpr (kColumns && kIsBf16<S>)
        for (int i = 0; i < kMxBandCols; ++i) maxima.of_columns[i] = std::int32_t{columns[i]} << 16;
}

/// The largest of all magnitudes.
inline std::int32_t largest_of(const MxMaxima& maxima, int blocks) {
    std::int32_t largest = 0;
    for (const auto& of_row : maxima.of_rows)
        for (int b = 0; b < blocks; ++b) largest = of_row[b] > largest ? of_row[b] : largest;
    return largest;
}

/// The largest magnitude of a square in the place of those of its lines.
inline void spread_over_squares(MxMaxima& maxima, int blocks) {
    for (int b = 0; b < blocks; ++b) {
        std::int32_t largest = 0;
        for (const auto& of_row : maxima.of_rows) largest = of_row[b] > largest ? of_row[b] : largest;
        for (auto& of_row : maxima.of_rows) of_row[b] = largest;
        for (int i = 0; i < kMxBlock; ++i) maxima.of_columns[b * kMxBlock + i] = largest;
    }
}

/// Exponents of blocks without NaN, by the largest magnitudes in them.
template <class F>
inline I32 exponents_of(const std::int32_t* magnitudes) {
    return exponent_above(bits(mul(floats(load_words(magnitudes)), splat(inverse_largest<F>()))));
}

/// The exponent, as floats have it, of the factor that goes with a block's exponent.
inline I32 exponent_before(I32 code) { return add(exclusive_or(code, splat(0xff)), splat(-1)); }

/// By what the elements of `kCount` lines are multiplied, also as they are cast in halves.
template <int kCount>
struct MxFactors {
    alignas(64) float of_lines[kCount];
    HalfScales<kCount> halves;
};

/// Writes the exponents of the first `count` of the lines, and finds the factors of their elements.
template <class F, bool kHalves, int kCount>
inline void scale_lines(const std::int32_t (&magnitudes)[kCount], int count, std::uint8_t* exponents, MxFactors<kCount>& factors) {
    alignas(64) std::int32_t codes[kCount];
    for (int i = 0; i < count; i += kLanes) {
        const I32 of_lines = exponents_of<F>(magnitudes + i);
        store_words(codes + i, of_lines);
        store(factors.of_lines + i, factor_before(of_lines));
        if constexpr (kHalves) set_scales<F>(factors.halves, i, exponent_before(of_lines));
    }
    for (int i = 0; i < count; ++i) exponents[i] = static_cast<std::uint8_t>(codes[i]);
}

/// The factors of a band: of the blocks in one of its rows, and of its columns.
struct MxBandFactors {
    MxFactors<kMxBandBlocks> row;
    MxFactors<kMxBandCols> columns;
};

/// `width` <= kStep elements of a row, from column c on.
template <class F, bool kRows, bool kColumns, class S>
[[gnu::flatten]] inline void encode_step(const MxBand& band, int r, int c, int width, const MxBandFactors& factors) {
    const S* const source = row_of<S>(band, r) + c;
    F32 x[kStepVectors];
    F32 of_rows[kStepVectors];
    I32 unused[kStepVectors] = {};
    for (int v = 0; v < kStepVectors; ++v) {
        x[v] = v * kLanes < width ? load(source + v * kLanes) : splat(0.0f);
        of_rows[v] = splat(kRows ? factors.row.of_lines[(c + v * kLanes) / kMxBlock] : 1.0f);
    }
    Bytes codes = encode<F>(x, of_rows, unused);
    if constexpr (kRows) store_step(band.codes + r * band.stride + c, codes, width);
    if constexpr (kColumns) {
        if (!kRows || !band.tiled) {  // the codes of a square are the same in both copies
            F32 of_columns[kStepVectors];
            for (int v = 0; v < kStepVectors; ++v) of_columns[v] = load(factors.columns.of_lines + c + v * kLanes);
            codes = encode<F>(x, of_columns, unused);
        }
        store_step(band.column_codes + r * band.stride + c, codes, width);
    }
}

/// Apart from the loop that rarely comes here, which it would take registers from.
template <class F, bool kRows, bool kColumns, class S>
[[gnu::noinline]] void encode_again(const MxBand& band, int r, int c, int width, const MxBandFactors& factors) {
    encode_step<F, kRows, kColumns, S>(band, r, c, width, factors);
}

/// The same of bf16 as it lies; returns whether it is to be encoded again as floats.
template <class F, bool kRows, bool kColumns>
inline bool encode_step_halves(const MxBand& band, int r, int c, int width, const MxBandFactors& factors) {
    const bf16* const source = row_of<bf16>(band, r) + c;
    U16 missed = splat(std::uint16_t{0});
    Halves x[kStepHalves];
    U16 codes[kStepHalves];
    for (int v = 0; v < kStepHalves; ++v)
        x[v] = Halves::of<F>(v * 2 * kLanes < width ? load_halves(source + v * 2 * kLanes) : splat(std::uint16_t{0}));
    if constexpr (kRows) {
        const auto& scales = factors.row.halves;
        for (int v = 0; v < kStepHalves; ++v) {
            const int b = (c + v * 2 * kLanes) / kMxBlock;
            codes[v] = x[v].template codes<F>(splat(scales.offset[b]), splat(scales.limit[b]), missed);
        }
        store_step(band.codes + r * band.stride + c, codes, width);
    }
    if constexpr (kColumns) {
        if (!kRows || !band.tiled) {
            const auto& scales = factors.columns.halves;
            for (int v = 0; v < kStepHalves; ++v) {
                const int i = c + v * 2 * kLanes;
                codes[v] = x[v].template codes<F>(load_halves(scales.offset + i), load_halves(scales.limit + i), missed);
            }
        }
        store_step(band.column_codes + r * band.stride + c, codes, width);
    }
    return any(missed);
}

template <class F, bool kRows, bool kColumns, class S>
inline void encode_row(const MxBand& band, int r, const MxBandFactors& factors, Trials& trials) {
    const auto each_step = [&](const auto& encode) {
        for (int c = 0; c < band.cols; c += kStep) encode(c, band.cols - c < kStep ? band.cols - c : kStep);
    };
    if constexpr (kIsBf16<S>) {
        if (trials.is_due()) {
            int steps = 0;
            int missed = 0;
            each_step([&](int c, int width) {
                ++steps;
                if (!encode_step_halves<F, kRows, kColumns>(band, r, c, width, factors)) return;
                encode_again<F, kRows, kColumns, S>(band, r, c, width, factors);
                ++missed;
            });
            return trials.note(missed, steps);
        }
    }
    each_step([&](int c, int width) { encode_step<F, kRows, kColumns, S>(band, r, c, width, factors); });
}

/// Again, for the blocks that have a NaN.
template <class F, class S>
inline void encode_nans(const MxBand& band, const MxMaxima& maxima) {
    for (int r = 0; r < kMxBlock; ++r) {
        for (int c = 0; c < band.cols; ++c) {
            const float x = to_float(row_of<S>(band, r)[c]);
            if (band.codes != nullptr && maxima.of_rows[r][c / kMxBlock] > kInfinityBits) {
                band.exponents[r * band.exponents_stride + c / kMxBlock] = static_cast<std::uint8_t>(kNanExponent);
                band.codes[r * band.stride + c] = encode_nan<F>(x);
            }
            if (band.column_codes != nullptr && maxima.of_columns[c] > kInfinityBits) {
                band.column_exponents[c] = static_cast<std::uint8_t>(kNanExponent);
                band.column_codes[r * band.stride + c] = encode_nan<F>(x);
            }
        }
    }
}

template <class S, class F, bool kRows, bool kColumns>
void quantize_band(const MxBand& given) {
    const MxBand band = given;  // bytes that are written might be its own, as far as a compiler knows
    const int blocks = band.cols / kMxBlock;
    MxMaxima maxima;
    MxBandFactors factors{};  // those of columns that the last step lacks are read along with the rest
    Trials trials;
    read_band<kColumns, S>(band, maxima);
    const bool any_nan = largest_of(maxima, blocks) > kInfinityBits;
    if (band.tiled) spread_over_squares(maxima, blocks);
    if constexpr (kColumns) scale_lines<F, kIsBf16<S>>(maxima.of_columns, band.cols, band.column_exponents, factors.columns);
    for (int r = 0; r < kMxBlock; ++r) {
        if constexpr (kRows) scale_lines<F, kIsBf16<S>>(maxima.of_rows[r], blocks, band.exponents + r * band.exponents_stride, factors.row);
        encode_row<F, kRows, kColumns, S>(band, r, factors, trials);
    }
    if (any_nan) encode_nans<F, S>(band, maxima);
}

template <class S, class F>
void quantize_mx(const MxBand& band) {
    if (band.column_codes == nullptr)
        quantize_band<S, F, true, false>(band);
    else if (band.codes == nullptr)
        quantize_band<S, F, false, true>(band);
    else
        quantize_band<S, F, true, true>(band);
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
