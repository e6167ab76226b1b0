// The cast kernels as a table of functions, one table a level. Plain data: shared by units with different flags.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/element_kind.hpp"
#include "runtime/tables.hpp"

namespace fusible::cast {

/// Side of the square that is transposed at once, in elements.
constexpr int kTile = 64;

/// Columns of a strip, a multiple of kTile; 256 measured the same as 64 (Zen 5, [4096, 1024]).
constexpr int kStripCols = kTile;

/// One strip of a matrix: rows x cols <= kTile x kStripCols elements at `source`. Null outputs are not written.
struct StripArguments {
    const void* source;
    std::ptrdiff_t source_stride;
    int rows;
    int cols;
    float scale;
    std::uint8_t* codes;  // [rows, cols]
    std::ptrdiff_t codes_stride;
    std::uint8_t* transposed;  // [cols, rows]
    std::ptrdiff_t transposed_stride;
    float* column_sums;  // [cols], added to
};

/// Elements that share an exponent in MXFP8.
constexpr int kMxBlock = 32;

/// The exponents of values that a product in bf16 computes as one in float does: no product of two is subnormal, none is infinite.
constexpr int kPlainExponent = 60;

/// The most columns that are cast at once: rows of floats as long as a page, of which a second pass finds a block's in the cache.
constexpr int kMxBandCols = 1024;

/// A band of kMxBlock rows of a matrix, `cols` <= kMxBandCols (whole blocks) wide. Null outputs are not written.
struct MxBand {
    const void* source;
    std::ptrdiff_t stride;  // of the source and of both codes
    int cols;
    std::uint8_t* codes;
    std::uint8_t* exponents;  // [kMxBlock, cols / kMxBlock], one for each block along a row
    std::ptrdiff_t exponents_stride;
    std::uint8_t* column_codes;
    std::uint8_t* column_exponents;  // [cols], one for each block along a column
    bool tiled;                      // one exponent for each square of kMxBlock, written for each of its lines
};

/// A band of one copy: `rows` <= kMxBlock rows whose blocks lie along them, or the kMxBlock rows of blocks that lie along columns.
struct MxCodes {
    const std::uint8_t* codes;
    std::ptrdiff_t stride;  // of the codes and of the values
    int rows;
    int cols;
    const std::uint8_t* exponents;
    std::ptrdiff_t exponents_stride;
    bool along_rows;
};

/// Elements that share a scale in NVFP4.
constexpr int kFp4Block = 16;

/// The largest part that is cast at once. Its rows are as many as a column's codes fill a cache line.
constexpr int kFp4PartRows = 128;
constexpr int kFp4PartCols = 256;

/// A part of a matrix, whole blocks high and wide, to be cast to E2M1 in lines: its rows, or its columns. Places are those of the first line.
struct Fp4Part {
    const void* source;
    std::ptrdiff_t stride;
    int rows;
    int cols;
    std::uint8_t* codes;  // two to a byte, the first in the low half
    std::ptrdiff_t codes_stride;
    std::uint8_t* scales;  // E4M3, one for each block of a line
    std::ptrdiff_t scales_stride;
    float from_amax;   // times the amax of a block: its scale
    float from_scale;  // 1 over this times a scale: the factor of the elements
    bool tiled;        // one scale for each square of kFp4Block, written for each of its lines
    std::uint64_t key;      // of the words by which is rounded; 0: to the nearest
    std::uint64_t counter;  // of the part's first element; those of a line are one apart
    std::uint64_t line_counters;  // from line to line
};

/// What each block of kFp4Block elements of a line, as a row, is multiplied by.
struct Fp4Transform {
    float entries[kFp4Block][kFp4Block];
    bool by_pairs;  // entries[j][i] is 1/4 with some sign of row j, times (-1)^popcount(i & j)
};

/// Elements along a line that share an fp32 scale, and the side of a square that does.
constexpr int kScaledBlock = 128;

/// A band of at most kScaledBlock rows of a matrix, from a boundary of blocks on. Null outputs are not written.
struct ScaledBand {
    const void* source;
    std::ptrdiff_t stride;  // of the source and of the codes
    int rows;
    int cols;
    float epsilon;
    bool power_of_two;
    bool tiled;  // one scale for each square
    std::uint8_t* codes;
    float* scales;  // of the band's first square: [rows], or one
    std::ptrdiff_t scales_step;
    std::uint8_t* column_codes;  // [cols, rows]
    std::ptrdiff_t column_stride;
    float* column_scales;  // of the first square: [its columns], or one
    std::ptrdiff_t column_scales_step;
};

/// Lines of one copy as it is stored, from a boundary of blocks on.
struct ScaledCodes {
    const std::uint8_t* codes;
    std::ptrdiff_t stride;  // of the codes and of the values
    int lines;
    int length;
    const float* scales;
    std::ptrdiff_t line_step;
    std::ptrdiff_t block_step;
};

/// Functions that look at wide floats return max |x| as the bits of a float: +inf and NaN compare above every finite number.
struct Kernels {
    std::int32_t (*quantize[kWideKinds][kFormats])(const void* source, std::uint8_t* codes, std::size_t count, float scale);
    std::int32_t (*quantize_strip[kWideKinds][kFormats])(const StripArguments& strip);
    std::int32_t (*amax[kWideKinds])(const void* source, std::size_t count);
    void (*dequantize[kFormats][kWideKinds])(const std::uint8_t* codes, void* out, std::size_t count, float scale_inv);
    void (*quantize_mx[kWideKinds][kFormats])(const MxBand& band);
    bool (*dequantize_mx[kFormats][kWideKinds])(const MxCodes& band, void* out);  // whether all values are plain, or zero
    void (*quantize_fp4[2][kWideKinds])(const Fp4Part& part);  // lines that are rows, lines that are columns
    std::int32_t (*transform_columns[kWideKinds])(const Fp4Part& part, const Fp4Transform& transform, void* out,  // bf16, as far from row to row
                                                  std::int32_t& of_source);
    void (*dequantize_fp4[kWideKinds])(const std::uint8_t* codes, const std::uint8_t* scales, void* out, int count);
    void (*quantize_blocks[kWideKinds][kFormats])(const ScaledBand& band);
    bool (*dequantize_blocks[kFormats][kWideKinds])(const ScaledCodes& lines, void* out);  // as dequantize_mx, and bf16 holds them
    void (*add_columns[kWideKinds])(const void* source, std::ptrdiff_t stride, int rows, int cols, float* sums);
    void (*transpose_tile)(const std::uint8_t* source, std::ptrdiff_t source_stride, std::uint8_t* out, std::ptrdiff_t out_stride);
};

FUSIBLE_DECLARE_TABLES(Kernels, kernels)

/// The table of the level in force.
const Kernels& kernels();

}  // namespace fusible::cast
