// An operand of a product: a matrix of wide floats, or of codes with their scale, and perhaps scales of blocks.
#pragma once

#include "cast/output.hpp"
#include "gemm/kernels.hpp"
#include "runtime/checks.hpp"

namespace fusible::gemm {

/// Scales of blocks of codes along the rows of an operand, or along its columns; none where there is one for all.
struct BlockScales {
    const std::uint8_t* data;
    std::int64_t width;      // bytes of one
    std::int64_t lines;      // rows that share them: a side of a square, or one; the length of a block along a column
    std::int64_t line_step;  // scales from there to the next
    std::int64_t block_step;
    std::int64_t length;  // of a block along a row; one where they lie along columns

    /// That of an element, from which on the others of its row follow.
    const void* at(std::int64_t row, std::int64_t col = 0) const {
        return data == nullptr ? nullptr : data + (row / lines * line_step + col / length * block_step) * width;
    }

    /// From block to block along the contracted dimension.
    std::int64_t depth_step() const { return length == 1 ? line_step : block_step; }

    /// From row to row, of those that lie in one square.
    std::int64_t row_step() const { return lines == 1 ? line_step : 0; }
};

struct Operand {
    const std::uint8_t* data;
    std::int64_t rows;  // as it is stored
    std::int64_t cols;
    ElementKind kind;
    std::int64_t width;  // bytes of an element
    bool transposed;
    float scale;
    codes::Coding coding;  // None: wide floats
    BlockScales scales;

    const void* at(std::int64_t row, std::int64_t col) const { return data + (row * cols + col) * width; }

    bool has_blocks() const { return scales.data != nullptr; }

    std::int64_t row_bytes() const { return bytes_of(cols); }

    /// Bytes of so many elements of a row.
    std::int64_t bytes_of(std::int64_t elements) const { return has_fours() ? elements / 2 : elements * width; }

    /// Whether two elements share a byte.
    bool has_fours() const { return coding == codes::Coding::Fp4 || coding == codes::Coding::MxFp4; }

    /// Codes with scales, from the first element of a block on: rows that lie in one square, where scales are of squares.
    CodedRows coded(std::int64_t row, std::int64_t col) const {
        return {data + row * row_bytes() + bytes_of(col), row_bytes(), scales.at(row, col), scales.depth_step(), scales.row_step()};
    }
};

Operand read_operand(const TensorView& view, bool transposed, DType dtype, Scalar scale, const char* name);

/// An operand in blocks, `name`. `along_rows`: rows of codes are contracted, and there is a scale for so many of each. Bytes of E8M0 are scales of 32
/// codes of FP8, floats of 128, along a row or, `tiled`, in a square; bytes of E4M3 are those of 16 codes of four bits, and float8_e8m0fnu those of 32.
/// Else it is FP8 with a byte of E8M0 for each 32 codes of a column.
Operand read_blocks(const TensorView& view, bool transposed, bool along_rows, DType dtype, Scalar scale, const TensorView& scales, bool tiled,
                    const char* name);

}  // namespace fusible::gemm
