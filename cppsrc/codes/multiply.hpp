// Products with few rows whose B is codes, with one scale or with scales of blocks. B is read once, as it lies.
//
// Order of accumulation. The elements of a column are taken chunk by chunk (decoders.hpp), and those of a chunk in its groups, which lie in one block
// of scales lane by lane. A lane adds up its products of a group in float, those of every kTurns-th vector apart; their sum is multiplied by the lane's
// factor and added to what the lane had (a product and its sum are one rounding where the level has fused multiply-add, else two). At the end of K, or of
// each KC elements of it where there are three rows and more, the lanes are added up. So a lane rounds at most three times an element, and a result is off
// by no more than 3 K / lanes + log2(lanes) + K / KC roundings of the sum of the magnitudes of its products. What is not a number is none in the result,
// whichever of a code, its scale and the other factor it is; an infinite scale is multiplied with a sum, and may give infinity where a sum of infinities
// would give NaN. Where A is bfloat16 and the level has dot products of it but no tiles, a lane has pairs of elements in the place of elements, and takes
// subnormal numbers as zero.
#pragma once

#include <type_traits>

#include "codes/decoders.hpp"
#include "codes/factors.hpp"

namespace fusible::codes::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

// Sums that are held, and rows of them: what a chunk is decoded to needs registers beside them.
#if defined(FUSIBLE_SIMD_AVX512)
template <class Decoder>
constexpr int kSumsHeld = 16;
constexpr int kMostRows = 8;
template <class Decoder>
constexpr int kTurns = 1;
#else
template <class Decoder>
constexpr int kSumsHeld = Decoder::kGroups * Decoder::kVectors > 4 ? 4 : 8;
constexpr int kMostRows = 4;
template <class Decoder>
constexpr int kTurns = Decoder::kGroups * Decoder::kVectors > 4 ? 1 : 2;
#endif

constexpr int kMostColumns = 4;  // lines of as many, and of those after them, have a place in the first cache, even where they are 4 KB apart
#define FUSIBLE_EACH_COLUMN _Pragma("GCC unroll 4")  // their sums stay in registers

/// KC of three rows and more: of A, all rows of so many floats stay in the first cache; of so many bfloat16 in the second one, where long stretches of
/// each column are worth more.
template <class Decoder>
constexpr std::int64_t kKC = std::is_same_v<typename Decoder::Element, float> ? 1024 : 4096;

/// Columns whose sums are held with those of so many rows.
constexpr int columns_of(int sums, int rows) { return sums / rows > kMostColumns ? kMostColumns : sums / rows; }

/// The exponent of the largest number among the elements; of none, that of the least one.
inline int largest_exponent(const float* elements, std::int64_t count) {
    constexpr std::int32_t kInfinity = 0x7f800000;
    std::int32_t largest = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int32_t size = bits_of(elements[i]) & 0x7fffffff;
        if (size < kInfinity && size > largest) largest = size;
    }
    return (largest >> 23) - 127;
}

/// Brings `count` elements that lie in their own order into that of a decoder, chunk by chunk. Where its values are so small that products would be too,
/// elements are made larger by as much, if that leaves them numbers. Returns the power of two by which sums are to be multiplied.
template <class Decoder, class Factors>
float reorder(float* elements, std::int64_t count) {
    constexpr int kElements = Decoder::kElements;
    static_assert(kMostElements % kElements == 0 && kSection % kElements == 0, "rows and sections are whole chunks");
    struct Order {
        std::uint8_t at[kElements] = {};
        constexpr Order() {
            for (int i = 0; i < kElements; ++i) at[i] = static_cast<std::uint8_t>(Decoder::element(i));
        }
    };
    static constexpr Order kOrder;
    constexpr int kSmall = 64;
    int grown = 0;
    if constexpr (Decoder::kExponent > kSmall) {
        const int room = 126 - largest_exponent(elements, count);
        grown = room < Decoder::kExponent ? room : Decoder::kExponent;
    }
    const float growth = power_of(127 + grown);
    for (std::int64_t first = 0; first < count; first += kElements) {
        float before[kElements];
        std::memcpy(before, elements + first, sizeof before);
        for (int i = 0; i < kElements; ++i) elements[first + i] = before[kOrder.at[i]] * growth;
    }
    return power_of(127 + Decoder::kExponent - grown);
}

/// The sums of a column and a row: those of the vectors that follow one another in turn, of which none waits for another.
template <int kCount>
struct Sums {
    F32 of[kCount];

    Sums() {
        for (F32& sum : of) sum = splat(0.0f);
    }

    F32 total() const {
        F32 all = of[0];
        for (int i = 1; i < kCount; ++i) all = add(all, of[i]);
        return all;
    }
};

/// Adds the products of a chunk of a column to the sums of each row. `factors`: from the chunk's first block on.
template <class Decoder, class Factors, int kHeight>
inline void multiply_chunk(const std::uint8_t* codes, const float* factors, const float* a, std::ptrdiff_t a_stride, Sums<kTurns<Decoder>> (&sums)[kHeight],
                           typename Decoder::Seen& seen) {
    constexpr int kVectors = Decoder::kVectors;
    const Decoder decoder(codes, seen);
    for (int g = 0; g < Decoder::kGroups; ++g) {
        Sums<kTurns<Decoder>> own[kHeight];
        Sums<kTurns<Decoder>>(&group)[kHeight] = Factors::kBlock == 0 ? sums : own;
        for (int v = g * kVectors; v < (g + 1) * kVectors; ++v) {
            const F32 column = decoder.values(v);
            for (int r = 0; r < kHeight; ++r) {
                F32& sum = group[r].of[v % kTurns<Decoder>];
                sum = fma(load(a + r * a_stride + v * kLanes), column, sum);
            }
        }
        if constexpr (Factors::kBlock != 0) {
            const F32 factor = factors_of_lanes<Decoder, Factors::kBlock>(factors, g);
            for (int r = 0; r < kHeight; ++r) sums[r].of[0] = fma(group[r].total(), factor, sums[r].of[0]);
        }
    }
}

/// The chunks of kTogether columns: of floats one.
template <class Decoder, class Factors, int kHeight, int kTogether>
inline void multiply_chunks(const std::uint8_t* const* codes, const float* const* factors, const float* a, std::ptrdiff_t a_stride,
                            Sums<kTurns<Decoder>> (*sums)[kHeight], typename Decoder::Seen& seen) {
    static_assert(kTogether == 1);
    multiply_chunk<Decoder, Factors>(*codes, *factors, a, a_stride, *sums, seen);
}

#if defined(FUSIBLE_CODES_AS_HALVES)

/// The same of bfloat16, by dot products of pairs, and of kTogether columns, for which a row is read once.
template <class Decoder, class Factors, int kHeight, int kTogether>
inline void multiply_chunks(const std::uint8_t* const* codes, const float* const* factors, const std::uint16_t* a, std::ptrdiff_t a_stride,
                            Sums<1> (*sums)[kHeight], NothingSeen&) {
    constexpr int kVectors = Decoder::kVectors;
    Units pairs[kTogether][kVectors];
    F32 factor[kTogether];
#pragma GCC unroll 2
    for (int c = 0; c < kTogether; ++c) {
        const Decoder decoder(codes[c]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) pairs[c][v] = decoder.pairs(v);
        if constexpr (Factors::kBlock != 0) factor[c] = factors_of_lanes<Decoder, Factors::kBlock>(factors[c], 0);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kHeight; ++r) {
        F32 own[kTogether];
#pragma GCC unroll 2
        for (int c = 0; c < kTogether; ++c) own[c] = Factors::kBlock == 0 ? sums[c][r].of[0] : splat(0.0f);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const Units row{_mm512_loadu_si512(a + r * a_stride + v * 2 * kLanes)};
#pragma GCC unroll 2
            for (int c = 0; c < kTogether; ++c) own[c] = dot(own[c], row, pairs[c][v]);
        }
#pragma GCC unroll 2
        for (int c = 0; c < kTogether; ++c) sums[c][r].of[0] = Factors::kBlock == 0 ? own[c] : fma(own[c], factor[c], sums[c][r].of[0]);
    }
}

/// Rows of floats that are bfloat16, as these, in the order of a decoder of pairs.
template <class Decoder, class Factors>
void pack_pairs(const float* a, std::ptrdiff_t stride, int rows, std::int64_t count, std::uint16_t* out, std::ptrdiff_t out_stride) {
    for (int r = 0; r < rows; ++r)
        for (std::int64_t first = 0; first < count; first += Decoder::kElements)
            for (int place = 0; place < Decoder::kElements; ++place) {
                const float element = a[r * stride + first + Decoder::half(place)];
                out[r * out_stride + first + place] = static_cast<std::uint16_t>(static_cast<std::uint32_t>(bits_of(element)) >> 16);
            }
}

#endif

/// Columns of which a chunk each is multiplied at once.
template <class Decoder>
constexpr int columns_together(int height, int width) {
    return std::is_same_v<typename Decoder::Element, float> || height == 1 || width % 2 != 0 ? 1 : 2;
}

/// Where a section's factors begin that a chunk needs.
template <class Factors>
inline const float* factors_from(const float* factors, std::int64_t element) {
    if constexpr (Factors::kBlock == 0) return factors;
    return factors + element / Factors::kBlock;
}

/// sums[r][c] += the products of kHeight rows and kWidth columns over the elements [first, last).
template <class Decoder, class Factors, int kHeight, int kWidth>
inline void multiply_columns(const FewRows& few, std::int64_t col, std::int64_t first, std::int64_t last) {
    constexpr int kElements = Decoder::kElements;
    constexpr int kPerByte = kElements / Decoder::kBytes;
    Sums<kTurns<Decoder>> sums[kWidth][kHeight];
    const std::uint8_t* b[kWidth];
    typename Decoder::Seen seen{};
    for (int c = 0; c < kWidth; ++c) b[c] = static_cast<const std::uint8_t*>(few.b) + (col + c) * few.b_stride;
    for (std::int64_t section = first; section < last; section += kSection) {
        const std::int64_t end = section + kSection < last ? section + kSection : last;
        alignas(64) float factors[kWidth][Factors::kRoom];
        if constexpr (Factors::kBlock != 0) Factors::read(few, col, kWidth, section, static_cast<int>(end - section), factors);
        std::int64_t k = section;
        for (; k + kElements <= end; k += kElements) {
            const auto* const a = static_cast<const typename Decoder::Element*>(few.a) + k;
            constexpr int kTogether = columns_together<Decoder>(kHeight, kWidth);
            FUSIBLE_EACH_COLUMN
            for (int c = 0; c < kWidth; c += kTogether) {
                const std::uint8_t* codes[kTogether];
                const float* own[kTogether];
                for (int i = 0; i < kTogether; ++i) {
                    codes[i] = b[c + i] + k / kPerByte;
                    own[i] = factors_from<Factors>(factors[c + i], k - section);
                    __builtin_prefetch(codes[i] + 2 * kWidth * few.b_stride, 0, 2);  // the columns after these: a CPU does not see where they begin
                }
                multiply_chunks<Decoder, Factors, kHeight, kTogether>(codes, own, a, few.a_stride, sums + c, seen);
            }
        }
        if (k == end) continue;
        for (int c = 0; c < kWidth; ++c) {
            std::uint8_t padded[Decoder::kBytes] = {};
            std::memcpy(padded, b[c] + k / kPerByte, static_cast<std::size_t>((end - k) / kPerByte));
            float own[kElements + kLanes] = {};  // of blocks that there are not, too
            if constexpr (Factors::kBlock != 0) {
                const std::int64_t blocks = (end - k + Factors::kBlock - 1) / Factors::kBlock;
                std::memcpy(own, factors_from<Factors>(factors[c], k - section), static_cast<std::size_t>(blocks) * sizeof(float));
            }
            const auto* const a = static_cast<const typename Decoder::Element*>(few.a) + k;
            const std::uint8_t* const codes = padded;
            const float* const factors_of_last = own;
            multiply_chunks<Decoder, Factors, kHeight, 1>(&codes, &factors_of_last, a, few.a_stride, sums + c, seen);
        }
    }
    F32 lanes[kWidth * kHeight];
    for (int c = 0; c < kWidth; ++c)
        for (int r = 0; r < kHeight; ++r) lanes[c * kHeight + r] = sums[c][r].total();
    float totals[kWidth * kHeight];
    sums_of_lanes(lanes, totals);
    for (int c = 0; c < kWidth; ++c) {
        const bool poisoned = has_nan(seen) && has_nan_code(b[c] + first / kPerByte, (last - first) / kPerByte);
        for (int r = 0; r < kHeight; ++r) {
            const float total = poisoned ? float_of(kQuietNan) : totals[c * kHeight + r] * few.row_factors[r];
            few.sums[r * few.sums_stride + col + c] += total;
        }
    }
}

template <class Decoder, class Factors, int kHeight>
void multiply_rows(const FewRows& few) {
    constexpr int kWidth = columns_of(kSumsHeld<Decoder>, kHeight);
    for (int r = 0; r < kHeight; ++r)
        for (std::int64_t c = 0; c < few.cols; ++c) few.sums[r * few.sums_stride + c] = 0.0f;
    const std::int64_t kc = kHeight <= 2 ? few.k : kKC<Decoder>;
    for (std::int64_t first = 0; first < few.k; first += kc) {
        const std::int64_t last = first + kc < few.k ? first + kc : few.k;
        std::int64_t col = 0;
        for (; col + kWidth <= few.cols; col += kWidth) multiply_columns<Decoder, Factors, kHeight, kWidth>(few, col, first, last);
        for (; col < few.cols; ++col) multiply_columns<Decoder, Factors, kHeight, 1>(few, col, first, last);
    }
}

template <class Decoder, class Factors, int kHeight>
void multiply_at_most(const FewRows& few) {
    if (few.rows == kHeight) return multiply_rows<Decoder, Factors, kHeight>(few);
    if constexpr (kHeight > 1) multiply_at_most<Decoder, Factors, kHeight - 1>(few);
}

template <class Decoder, class Factors>
inline void multiply_all(const FewRows& few) {
    FewRows some = few;
    for (int left = few.rows; left > 0; left -= some.rows) {
        some.rows = left < kMostRows ? left : kMostRows;
        multiply_at_most<Decoder, Factors, kMostRows>(some);
        some.a = static_cast<const typename Decoder::Element*>(some.a) + some.rows * few.a_stride;
        some.row_factors += some.rows;
        some.sums += some.rows * few.sums_stride;
    }
}

template <class Decoder, class Factors>
void multiply(const FewRows& few) {
    multiply_all<Decoder, Factors>(few);
}

#if defined(FUSIBLE_CODES_AS_HALVES)

template <class Decoder, class Factors>
void multiply_pairs(const FewHalves& few) {
    float ones[kRowsOfHalves];
    for (float& one : ones) one = 1.0f;
    FewRows all = few.codes;
    all.a = few.a;
    all.row_factors = ones;
    multiply_all<Decoder, Factors>(all);
}

#endif

#undef FUSIBLE_EACH_COLUMN

}  // namespace
}  // namespace fusible::codes::FUSIBLE_LEVEL
