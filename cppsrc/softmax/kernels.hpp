// The softmax kernels as a table of functions, one table a level. Plain data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cast/kernels.hpp"
#include "runtime/tables.hpp"

namespace fusible::softmax {

/// Floats beyond a row's width that its scratch must have: the lanes of the widest level.
constexpr std::size_t kSoftmaxPadding = 16;

/// What stands for a masked score. It replaces the score, so that a row that is all masked has it as its maximum.
constexpr float kMaskedScore = -10000.0f;

/// One row of scores, of which the first `visible` of `width` take part and the others become 0.
struct SoftmaxRow {
    const void* source;
    const std::uint8_t* mask;  // [width], 1 = masked; null in a call of the kernel without
    void* out;
    float* scratch;  // [width + kSoftmaxPadding]
    std::int64_t visible;
    std::int64_t width;
    float scale;
};

struct SoftmaxGradientRow {
    const void* grads;
    const void* results;
    void* out;
    std::int64_t visible;
    std::int64_t width;
    float scale;
};

struct Kernels {
    /// By source type, and by whether there is a mask.
    void (*forward[kWideKinds][2])(const SoftmaxRow& row);
    void (*backward[kWideKinds])(const SoftmaxGradientRow& row);
};

FUSIBLE_DECLARE_TABLES(Kernels, kernels)

/// The table of the level in force.
const Kernels& kernels();

}  // namespace fusible::softmax
