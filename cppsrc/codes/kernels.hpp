// The kernels of products with few rows whose B is codes, as a table of functions, one table a level. Plain data: shared by units with different flags.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/tables.hpp"

namespace fusible::codes {

/// Codes of B that are read where they lie: their format, and how many of them have a scale. In the order of the tables.
enum class Coding : int { E4M3, E5M2, MxE4M3, MxE5M2, BlocksE4M3, BlocksE5M2, Fp4, MxFp4, None };
constexpr int kCodings = 8;

/// The elements that are decoded at once are a part of so many, to a multiple of which rows of A are filled up with zeros.
constexpr int kMostElements = 128;

/// A product of few rows: sums[r, c] = sum over k of a[r, k] b[c, k].
struct FewRows {
    const void* a;  // its rows: of floats, in the order that `reorder` gives; or of bfloat16, in that of pack_halves
    std::ptrdiff_t a_stride;
    const float* row_factors;  // by what the sums of each are multiplied
    int rows;
    const std::uint8_t* b;  // [cols, K], its rows b_stride bytes apart
    std::ptrdiff_t b_stride;
    std::int64_t k;  // elements
    std::int64_t cols;
    float* sums;
    std::ptrdiff_t sums_stride;
    const void* scales;  // of blocks along K, where there are any: floats or bytes, so many of them apart from column to column and along K
    std::ptrdiff_t scale_line_step;
    std::ptrdiff_t scale_block_step;
};

/// The same of at most kRowsOfHalves rows of bfloat16.
struct FewHalves {
    FewRows codes;           // without an A
    const std::uint16_t* a;  // packed by pack_halves
};
constexpr int kRowsOfHalves = 32;

struct Kernels {
    void (*multiply[kCodings])(const FewRows& few);

    /// Brings the elements of a row of A into the order of a decoder, in place, and times a power of two: so many of them, in multiples of kMostElements.
    /// Returns by what the row's sums are to be multiplied.
    float (*reorder[kCodings])(float* elements, std::int64_t count);

    /// By tiles or dot products of bfloat16, where the level has them and they are faster, else null: `count` elements, in multiples of kMostElements, of
    /// some rows of floats that are bfloat16, packed; and the product. From so many rows on.
    void (*pack_halves[kCodings])(const float* a, std::ptrdiff_t stride, int rows, std::int64_t count, std::uint16_t* out, std::ptrdiff_t out_stride);
    void (*multiply_by_halves[kCodings])(const FewHalves& few);
    int rows_of_halves;
};

FUSIBLE_DECLARE_TABLES(Kernels, kernels)
namespace avx512bf16 {  // which permutes bytes
extern const Kernels kernels;
}
namespace amx {
extern const Kernels kernels;
}

/// The table of the level in force.
const Kernels& kernels();

}  // namespace fusible::codes
