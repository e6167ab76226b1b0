// The kernels of attention as a table of functions, one table a level. Plain data: shared by units with different flags.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cast/output.hpp"
#include "runtime/tables.hpp"

namespace fusible::attention {

constexpr int kMaxBlockRows = 96;   // queries of a forward block: a multiple of every level's tile
constexpr int kMaxTileKeys = 256;   // keys that a forward block sees at once
constexpr int kScoreStride = kMaxTileKeys + 16;
constexpr int kGradKeys = 192;      // keys and
constexpr int kGradRows = 128;      // queries of a backward block
constexpr int kGradStride = kGradRows + 16;
constexpr int kMaxLanes = 16;
constexpr int kOperandRows = 16;    // whole numbers of which a left operand of a product has memory for

/// Positions [begin, end); none where end <= begin.
struct Span {
    int begin;
    int end;
};

/// What is kept of the scores: those whose random word reaches `threshold`, times `factor`. The word of score (i, j) of a head is that of the
/// counter first + i * width + j.
struct Dropout {
    std::uint64_t key;  // 0: there is no dropout; the key of a seed is odd
    std::uint64_t threshold;
    std::uint64_t width;
    float factor;
};

/// A block of queries beside a tile of keys. Operands are packed units (gemm/pack.hpp).
struct AttendTile {
    const std::int32_t* q;  // unit u of row r at q[r * q_stride + u]; memory for whole numbers of kOperandRows, as in `probabilities`
    std::ptrdiff_t q_stride;
    int rows;
    std::int64_t depth;     // units of q and k
    const std::int32_t* k;  // panels of keys, each [depth, panel]
    const std::int32_t* v;  // panels of value columns, v_stride apart, each [units of keys, panel]
    std::ptrdiff_t v_stride;
    int value_panels;
    int keys;
    const Span* seen;  // of each row: the keys that it sees
    float scale;
    Dropout dropout;
    const std::uint64_t* counters;  // of each row: the counter of its first key in the tile

    float* scores;                // [rows, kScoreStride], scratch
    std::int32_t* probabilities;  // [rows, kScoreStride], scratch

    float* largest;  // of each row: its largest score,
    float* base;     // what its exponentials are taken relative to,
    float* sums;     // their sum, in kMaxLanes parts,
    float* out;      // and their products with the values: whole panels, out_stride apart
    std::ptrdiff_t out_stride;
};

/// A block of keys beside a block of queries of one head, for the gradients. Scores are held with the keys as rows.
struct GradientTile {
    int keys;
    int rows;
    std::int64_t depth;         // units of q and k
    std::int64_t value_depth;   // units of do and v
    const std::int32_t* k;      // unit u of key j at k[j * k_stride + u]
    std::ptrdiff_t k_stride;
    const std::int32_t* v;
    std::ptrdiff_t v_stride;
    const std::int32_t* q_turned;  // panels of queries, each [depth, panel]
    const std::int32_t* o_turned;  // of the gradient of o
    const std::int32_t* q_across;  // panels of columns, across_stride apart, each [units of queries, panel]
    const std::int32_t* o_across;
    std::ptrdiff_t across_stride;
    const std::int32_t* k_across;  // panels of columns, k_across_stride apart, each [units of keys, panel]
    std::ptrdiff_t k_across_stride;
    int panels;        // of columns of q and k
    int value_panels;  // of o and v
    const Span* seers;  // of each key: the rows that see it; empty ones up to whole units
    const Span* seen;   // of each row: the keys that it sees
    float scale;
    const float* stats;  // of each row, in whole vectors as `delta`
    const float* delta;
    Dropout dropout;
    std::uint64_t counter;  // of the first key and row

    float* scores;     // [keys, kGradStride], scratch, as the four below
    float* gradients;
    std::int32_t* probabilities;
    std::int32_t* differences;
    std::int32_t* differences_across;  // [units of keys, kGradStride]

    float* dq;  // added to: whole panels, in units of dq_stride
    std::ptrdiff_t dq_stride;
    float* dk;
    std::ptrdiff_t dk_stride;
    float* dv;
    std::ptrdiff_t dv_stride;
};

struct Kernels {
    int depth;  // elements of a unit
    int lanes;  // units of a vector
    int panel;  // columns of a panel
    bool takes[kWideKinds];

    /// As in gemm/pack.hpp.
    void (*pack_rows[kWideKinds])(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t depth, std::int32_t* out,
                                  std::int64_t out_stride);
    void (*pack_across[kWideKinds])(const void* source, std::int64_t stride, std::int64_t depth, std::int64_t width, std::int32_t* out,
                                    std::int64_t out_stride);
    void (*pack_turned[kWideKinds])(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t depth, std::int32_t* out);

    void (*attend)(const AttendTile& tile);
    void (*differentiate)(const GradientTile& tile);

    /// The sum of a[i] * b[i].
    float (*dot[kWideKinds])(const void* a, const void* b, std::int64_t count);

    /// out[i] = values[i] * factor, rounded once.
    void (*write[kWideKinds])(const float* values, float factor, std::int64_t count, void* out);
};

FUSIBLE_DECLARE_TABLES(Kernels, kernels)
namespace avx512bf16 {
extern const Kernels kernels;
}
namespace amx {
extern const Kernels kernels;
}

}  // namespace fusible::attention
