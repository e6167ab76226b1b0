// The activation kernels as a table of functions, one table a level. Plain data: shared by units with different flags.
#pragma once

#include <cstdint>

#include "activation/list.hpp"
#include "cast/kernels.hpp"
#include "cast/output.hpp"
#include "runtime/tables.hpp"

namespace fusible::activation {

/// The order of the tables below. A gated activation is a pointwise one of the first half times the second half, or a formula of its own.
#define FUSIBLE_NAME(name, ...) #name,
#define FUSIBLE_NAME_OF_GATED(name, gated, formula) #gated,
constexpr const char* kPointwiseNames[] = {FUSIBLE_POINTWISE_ACTIVATIONS(FUSIBLE_NAME)};
constexpr const char* kGatedNames[] = {FUSIBLE_POINTWISE_ACTIVATIONS(FUSIBLE_NAME_OF_GATED) FUSIBLE_GATED_ACTIVATIONS(FUSIBLE_NAME)};
#undef FUSIBLE_NAME
#undef FUSIBLE_NAME_OF_GATED
constexpr int kPointwise = sizeof(kPointwiseNames) / sizeof(kPointwiseNames[0]);
constexpr int kGated = sizeof(kGatedNames) / sizeof(kGatedNames[0]);

/// What situglu and clamped_swiglu take beside their input.
struct GateParameters {
    float beta1;
    float beta2;
    float limit;
    float alpha;
    float offset;
};

/// Operands of a formula as float32, `count` a multiple of the lanes: an incoming gradient (or null), x or the first half, the second half.
struct Points {
    const float* grad;
    const float* a;
    const float* b;
    std::int64_t count;
    GateParameters parameters;
};

/// A formula on many points. `second` is for the gradient of a gated activation, which has two results.
using Formula = void (*)(const Points& points, float* first, float* second);

/// A matrix that is read: of a wide kind, and the elements from one row to the next.
struct Operand {
    const void* data;
    ElementKind kind;
    std::int64_t stride;
};

/// Formula at every point of [rows, width]: of x [rows, halves_in * width] and grad [rows, width] into out [rows, halves_out * width].
struct ActivationJob {
    Formula formula;
    Operand grad;  // data is null where there is none
    Operand x;
    cast::Output out;
    std::int64_t width;
    int halves_in;
    int halves_out;
    GateParameters parameters;
};

/// A rectangle of a job.
struct Block {
    std::int64_t row;
    std::int64_t col;
    int rows;
    int cols;
};

/// Computes a block and emits it. Returned are the bits of max |result| of codes; `column_sums` (of the whole matrix, or null) are added to.
using Emitter = std::int32_t (*)(const ActivationJob& job, const Block& block, float* column_sums);

/// Elements that are computed at once, between buffers in the first-level cache; 1024 measured best of 512 to 2048 (Zen 5).
constexpr int kRun = 1024;

struct Kernels {
    Formula value[kPointwise];
    Formula gradient[kPointwise];
    Formula gated_value[kGated];
    Formula gated_gradient[kGated];
    Emitter run;   // at most kRun elements, row by row
    Emitter tile;  // at most cast::kTile x cast::kTile elements, with a transposed copy
};

FUSIBLE_DECLARE_TABLES(Kernels, kernels)

}  // namespace fusible::activation
