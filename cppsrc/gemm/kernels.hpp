// The kernels of a matrix product as a table of functions, one table a level. Plain data: shared by units with different flags.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cast/output.hpp"
#include "codes/kernels.hpp"
#include "runtime/tables.hpp"

namespace fusible::gemm {

/// A block of a product, of packed operands: sums[r, c] (+)= sum over u of a[r, u] b[u, c].
struct Block {
    const std::int32_t* a;  // unit u of row r at a[r * row_stride + u * unit_stride]; or in squares, whose rows have row_stride units
    std::ptrdiff_t row_stride;
    std::ptrdiff_t unit_stride;
    int rows;
    const std::int32_t* b;  // micro-panel p at b + p * panel_stride, of KC rows of NR units, and then perhaps of rows of NR factors
    std::ptrdiff_t panel_stride;
    int cols;
    std::int64_t kc;            // units
    std::int64_t factor_units;  // of K, whose sum of products is multiplied by a row of factors; 0: there are none
    const float* row_factors;   // and by the row's, of which each factor_units have as many as there are rows; null: there are none
    float* sums;      // whole micro-panels wide; of the last one, whole vectors are written
    std::ptrdiff_t sums_stride;
    bool add_to;
    const void* ahead;  // what is wanted after it, fetched meanwhile; null: of B, each slab during the one before
    std::int64_t ahead_bytes;
};

/// Rows of codes with scales of blocks along them, from a row on and from the first element of a block on; or with blocks along columns, from the first
/// row of a block on.
struct CodedRows {
    const std::uint8_t* codes;
    std::ptrdiff_t stride;  // bytes
    const void* scales;     // bytes or floats, so many of them apart from block to block, and from row to row where blocks lie along these
    std::ptrdiff_t scale_block_step;
    std::ptrdiff_t scale_row_step;
};

/// Rows of A that a product reads B for without packing it.
constexpr int kFewRows = 8;

/// A product of at most kFewRows rows: sums[r, c] = sum over k of a[r, k] b[c, k].
struct FewRows {
    const std::int32_t* a;  // packed by pack_rows
    std::ptrdiff_t a_stride;
    int rows;
    const void* b;  // [cols, K], its rows b_stride elements apart
    std::ptrdiff_t b_stride;
    std::int64_t k;  // elements
    std::int64_t cols;
    float* sums;
    std::ptrdiff_t sums_stride;
};

enum class GeluStep : int { None = 0, Apply = 1, Multiply = 2 };

/// What becomes of the sums: out = g(scale * sum + beta * addend + bias), with g the GELU or the factor gelu'(pre).
struct Epilogue {
    float scale;
    float beta;  // 0: there is no addend
    const void* addend;
    ElementKind addend_kind;
    const void* bias;  // [cols] or null
    ElementKind bias_kind;
    GeluStep gelu;
    void* pre;  // what the GELU is applied to, written (or null); or what its derivative is taken at
    ElementKind pre_kind;
    cast::Output out;
};

/// A part of the result that is finished: `rows` x `cols` sums that belong at (row, col).
struct FinishedBlock {
    float* sums;  // overwritten
    std::ptrdiff_t sums_stride;
    std::int64_t row;
    std::int64_t col;
    int rows;
    int cols;
    float* column_sums;  // of the whole matrix, added to; or null
};

struct Kernels {
    int depth;  // elements of a unit
    int lanes;  // units of a vector
    int nr;     // columns of a micro-panel
    int factor_rows;  // of a packed micro-panel, behind its units, for each block whose sums are scaled: the factors are the first of these
    bool takes[kElementKinds];
    ElementKind units_kind;  // the kind of which elements in a row are units as they lie
    bool reads_tiles;        // whether the A of a block lies in squares of `lanes` rows and units

    /// [rows, depth] contiguous in depth -> out[r][u]; see pack.hpp for all three.
    void (*pack_rows[kElementKinds])(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t depth, std::int32_t* out,
                                     std::int64_t out_stride);
    /// [depth, width] contiguous in width -> out[u][j].
    void (*pack_across[kElementKinds])(const void* source, std::int64_t stride, std::int64_t depth, std::int64_t width, std::int32_t* out,
                                       std::int64_t out_stride);
    /// [rows <= NR, depth] contiguous in depth -> out[u][r].
    void (*pack_turned[kElementKinds])(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t depth, std::int32_t* out);

    /// pack_rows and pack_turned of codes times their scales (coded_rows.hpp), by codes::Coding; null where there is one scale for all.
    void (*pack_coded_rows[codes::kCodings])(const CodedRows& source, std::int64_t rows, std::int64_t depth, std::int32_t* out,
                                             std::int64_t out_stride);
    void (*pack_coded_turned[codes::kCodings])(const CodedRows& source, std::int64_t rows, std::int64_t depth, std::int32_t* out);
    /// pack_across of codes with a byte for each block of a column; null of all but MxE4M3 and MxE5M2.
    void (*pack_coded_across[codes::kCodings])(const CodedRows& source, std::int64_t depth, std::int64_t width, std::int32_t* out,
                                               std::int64_t out_stride);

    /// [rows, depth], and [depth, width] whose columns are the rows, in squares: for kernels that read tiles.
    void (*pack_tiles[kElementKinds])(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t depth, std::int32_t* out,
                                      std::int64_t out_stride);
    void (*pack_tiles_down[kElementKinds])(const void* source, std::int64_t stride, std::int64_t depth, std::int64_t width, std::int32_t* out,
                                           std::int64_t out_stride);

    /// The same of codes times their scales: null where the two above are.
    void (*pack_coded_tiles[codes::kCodings])(const CodedRows& source, std::int64_t rows, std::int64_t depth, std::int32_t* out,
                                              std::int64_t out_stride);
    void (*pack_coded_tiles_down[codes::kCodings])(const CodedRows& source, std::int64_t depth, std::int64_t width, std::int32_t* out,
                                                   std::int64_t out_stride);

    void (*multiply)(const Block& block);

    /// out[c][r] = sums[r][c], in whole squares of `lanes`: both sides reach to the next one.
    void (*turn)(const float* sums, std::ptrdiff_t stride, int rows, int cols, float* out, std::ptrdiff_t out_stride);

    void (*multiply_few_rows[kElementKinds])(const FewRows& few);

    /// Returns the bits of max |value| where codes are written.
    std::int32_t (*finish)(const Epilogue& epilogue, const FinishedBlock& block);
};

FUSIBLE_DECLARE_TABLES(Kernels, kernels)
namespace avx512bf16 {
extern const Kernels kernels;
extern const Kernels kernels_of_sums;      // of operands whose scales are multiplied with sums
extern const Kernels kernels_of_integers;  // of two operands in blocks of codes of four bits
}
namespace amx {
extern const Kernels kernels;
}

}  // namespace fusible::gemm
