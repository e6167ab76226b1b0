// The optimizer's kernels as a table of functions, one table a level. Plain data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cast/kernels.hpp"
#include "runtime/tables.hpp"

namespace fusible::optimizer {

/// What weight decay is added to: the gradient (L2) or the update (AdamW).
enum class Decay : int { Nothing, Gradient, Update };

/// The numbers of one step of Adam. The corrections are the inverses of 1 - beta^step.
struct AdamStep {
    float lr;
    float beta1;
    float beta2;
    float one_minus_beta1;
    float one_minus_beta2;
    float epsilon;
    float correction1;
    float correction2;
    float weight_decay;
};

/// A run of elements. Numbers of float16 and of E4M3 are codes times `decode`, and what is written is multiplied by `encode` before its rounding.
struct Elements {
    void* data;
    ElementKind kind;
    float decode;
    float encode;
};

/// A run of elements of one parameter.
struct AdamRun {
    Elements gradient;
    Elements weight;  // read and written
    Elements first;
    Elements second;
    Elements copy;            // written as the weight is; of null, where there is none
    std::int16_t* remainder;  // the lower words of a weight whose upper ones are bf16, or null
};

/// The bits of the largest magnitudes that a step makes.
struct AdamAmaxes {
    std::int32_t first;
    std::int32_t second;
    std::int32_t weight;  // 0 where it is not asked for
};

/// The numbers of one step of stochastic gradient descent.
struct SgdStep {
    float lr;
    float momentum;
    float one_minus_dampening;
    float weight_decay;
    float scale;  // of the gradient
    bool nesterov;
    bool first_run;    // the momentum begins with this gradient
    bool decay_after;  // weight decay is added to what the momentum gave, not to the gradient
};

/// A run of elements of one parameter.
struct SgdRun {
    Elements gradient;
    Elements weight;  // read and written
    Elements momentum;
    Elements copy;  // written as the weight is; of null, where there is none
};

struct Kernels {
    /// By what weight decay is added to.
    void (*adam[3])(const AdamRun& run, std::size_t count, const AdamStep& step);
    /// By the same: what a step would make, of which nothing is written.
    AdamAmaxes (*adam_amaxes[3])(const AdamRun& run, std::size_t count, const AdamStep& step, bool of_weights);
    /// By whether there is momentum.
    void (*sgd[2])(const SgdRun& run, std::size_t count, const SgdStep& step);
    /// By source type: the sum of the squares, in double.
    double (*sum_of_squares[kWideKinds])(const void* source, std::size_t count);
    /// By source type and type of the output: out = source * scale; returns the bits of max |source|, +inf and NaN above every finite number.
    std::int32_t (*scale[kWideKinds][kWideKinds])(const void* source, void* out, std::size_t count, float scale);
};

FUSIBLE_DECLARE_TABLES(Kernels, kernels)

/// The table of the level in force.
const Kernels& kernels();

}  // namespace fusible::optimizer
