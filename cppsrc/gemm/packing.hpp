// Blocks of the operands as a schedule packs them.
#pragma once

#include "gemm/plan.hpp"

namespace fusible::gemm {

/// Columns [n0, n0 + nc) of C, by the elements [k0, k0 + kc) of K.
struct Round {
    std::int64_t n0;
    std::int64_t nc;
    std::int64_t k0;
    std::int64_t kc;
    const std::int32_t* b;  // packed, from micro-panel `first_panel` on
    std::int64_t first_panel;
    float* sums;  // of all rows and this round's columns, where there are several rounds a column; else null
    bool last;    // of its columns
};

/// A micro-panel of B: NR columns from the panel-th on of a round, [units of KC, NR].
void pack_b_panel(const Product& p, const Round& round, std::int64_t panel, std::int32_t* out);

/// Rows [row, row + rows) of an A that is not transposed, from the element k0 on, each in `stride` units.
void pack_a_rows(const Product& p, std::int64_t row, std::int64_t rows, std::int64_t k0, std::int64_t depth, std::int32_t* out, std::int64_t stride);

/// A micro-panel of A where the roles are exchanged: NR rows, the panel-th of those that begin with `row`, up to `end`, [units of K, NR].
void pack_a_panel(const Product& p, std::int64_t row, std::int64_t end, std::int64_t panel, std::int32_t* packed);

/// Units of a packed block of A, MC x KC.
std::int64_t a_block_units(const Product& p, const Round& round);

/// The i-th block of rows, of which A is packed to `out`.
Block pack_a_block(const Product& p, const Round& round, std::int64_t i, std::int32_t* out);

/// Rows [col, col + cols) of a transposed B as the A of a block: where they lie, or decoded.
void read_b_rows(const Product& p, std::int64_t col, std::int64_t cols, Block& block);

/// The product of the i-th block of rows and the micro-panels [first, last) of a round; finished, where the round is the last of its columns.
void multiply_block(Product& p, const Round& round, std::int64_t i, Block block, std::int64_t first, std::int64_t last);

}  // namespace fusible::gemm
