// How a product C = A B is made, in the terms of BLIS (Van Zee and van de Geijn 2015): A is [M, K] (`left`, transposed or not), B [K, N] (`right`).
//
// The micro-kernel (tile.hpp) keeps MR x NR sums of C in registers. It reads B packed: in micro-panels of NR columns, one after another, each in the
// order in which the kernel wants it; and MR rows of A, an element of each at a time, from a block that is packed too (decoded, but not cut into
// micro-panels and laid out as A lies: an element is broadcast from wherever it is). Around it lie three loops, by blocks that stay in a cache each:
//
//   NC columns of B, packed by KC x NC, of a size that the caches of all cores hold together;
//   KC elements of K: the sums of several such blocks are added up in memory;
//   MC rows of A, packed by MC x KC, in the second-level cache; a slab of a micro-panel of B (kernels.cpp) stays in the nearest one.
//
// Tiles multiply so fast that no second-level cache has what they need of all of KC: it has a slab of both operands, and MC x 384 sums (amx.hpp).
//
// Packed elements are units of 32 bits (units.hpp), so that sizes in bytes do not depend on the kind of the operands. A block of C is finished (scaled,
// activated, rounded: epilogue.hpp) while its sums are in cache.
#pragma once

#include "cast/column_sums.hpp"
#include "cast/maximum.hpp"
#include "gemm/kernels.hpp"
#include "gemm/operand.hpp"
#include "gemm/scaling.hpp"
#include "runtime/round_up.hpp"

namespace fusible::gemm {

constexpr std::int64_t kMaxKC = 4096;          // elements of K packed at once
constexpr std::int64_t kTiledMaxKC = 8192;     // the same of tiles
constexpr std::int64_t kSumsCols = 256;        // of the sums that a task has in cache
constexpr std::int64_t kTiledSumsCols = 384;   // the same of tiles
constexpr std::int64_t kMaxFewRows = 24;       // of M, for which B is not packed
constexpr std::int64_t kMaxFewTiledRows = 8;   // the same of tiles, which take sixteen rows at once
constexpr std::int64_t kMaxFewCodedRows = 32;  // the same where tiles are decoded from codes
constexpr std::int64_t kFewRowsCols = 48;      // NC, a task's columns: a multiple of all numbers of columns that are summed at once
constexpr std::int64_t kFewCodesCols = 64;     // the same of codes, which lie in one square of blocks; the largest

/// Which loops are run; schedules.hpp says of each when and why.
enum class Schedule { Blocked, WholeA, Turned, FewRows, FewCodes };

struct Plan {
    Schedule schedule;
    std::int64_t mc;  // rows of C that share a packing of A
    std::int64_t nc;  // columns of C that share a packing (or one reading) of B
    std::int64_t kc;  // elements of K that are packed at once; less than K in the blocked schedule alone
};

struct Product {
    const Kernels& kernels;
    const codes::Kernels* codes;  // where there are few rows, and codes of B to be read as they lie; else null
    Operand a;
    Operand b;
    Scaling scaling_a;
    Scaling scaling_b;
    bool halves_hold_a;  // bf16 has its values
    std::int64_t m;
    std::int64_t n;
    std::int64_t k;
    std::int64_t chunk_rows;  // MC of the blocked schedules
    Epilogue epilogue;
    cast::ColumnSums* column_sums;  // a chunk for each chunk_rows rows of C, of which a schedule with more rows uses the first; or null
    int threads;
    cast::Maximum maximum;

    std::int64_t units(std::int64_t elements) const { return (elements + kernels.depth - 1) / kernels.depth; }
    std::int64_t micro_panels(std::int64_t count) const { return (count + kernels.nr - 1) / kernels.nr; }

    /// Rows for which there is memory where a block has so many: tiles are whole.
    std::int64_t rows_held(std::int64_t rows) const { return kernels.reads_tiles ? round_up(rows, kernels.lanes) : rows; }

    std::int64_t max_kc() const { return kernels.reads_tiles ? kTiledMaxKC : kMaxKC; }

    /// Columns of C whose sums a task has in cache.
    std::int64_t sums_cols() const { return kernels.reads_tiles ? kTiledSumsCols : kSumsCols; }

    /// Whether an operand is packed with its scales: times these, or integers and then these.
    bool packs_coded_a() const { return a.has_fours() || scaling_a == Scaling::OfValues || scaling_a == Scaling::OfFloats; }
    bool packs_coded_b() const { return b.has_fours() || scaling_b == Scaling::OfValues || scaling_b == Scaling::OfFloats; }

    bool scales_sums() const { return scaling_b == Scaling::OfSums || scaling_a == Scaling::OfSums; }

    /// Elements of K whose sum of products is scaled: of the blocks of both, where both are scaled so.
    std::int64_t factor_length() const { return scaling_b == Scaling::OfSums ? b.scales.length : a.scales.length; }

    /// Blocks along so many elements of K whose sums are scaled.
    std::int64_t factors(std::int64_t elements) const { return scales_sums() ? (elements + factor_length() - 1) / factor_length() : 0; }

    /// Units of a packed micro-panel of B, with its factors.
    std::int64_t panel_units(std::int64_t elements) const { return (units(elements) + kernels.factor_rows * factors(elements)) * kernels.nr; }
};

/// Rows of a block of A, and of a chunk of the column sums: of one size and even in number, for two threads or four. They follow from the sizes alone,
/// so that a sum of columns has one order.
std::int64_t chunk_rows_for(std::int64_t m, std::int64_t k, bool transposes, bool tiles);

Plan plan_for(const Product& p);

}  // namespace fusible::gemm
