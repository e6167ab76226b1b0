// One step of stochastic gradient descent with momentum (Polyak 1964; Nesterov: Sutskever et al. 2013) on a run of elements, in fp32.
#pragma once

#include "optimizer/block.hpp"

namespace fusible::optimizer::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Without decay no weight, and in the first run no momentum, is read into the sums: one that is not finite must not make them NaN.
template <bool Momentum>
inline void sgd_block(const float* gradient, float* weight, float* momentum, std::int64_t count, const SgdStep& step) {
    const bool decays_first = step.weight_decay != 0 && !step.decay_after;
    const bool decays_last = step.weight_decay != 0 && step.decay_after;
    each_vector(count, [=](std::int64_t i, auto lanes) {
        const F32 w = load(weight + i, lanes);
        F32 d = mul(splat(step.scale), load(gradient + i, lanes));
        if (decays_first) d = fma(splat(step.weight_decay), w, d);
        if constexpr (Momentum) {
            F32 m = d;
            if (!step.first_run) m = fma(splat(step.momentum), load(momentum + i, lanes), mul(splat(step.one_minus_dampening), d));
            store(momentum + i, m, lanes);
            d = step.nesterov ? fma(splat(step.momentum), m, d) : m;
        }
        if (decays_last) d = fma(splat(step.weight_decay), w, d);
        store(weight + i, sub(w, mul(splat(step.lr), d)), lanes);
    });
}

template <bool Momentum>
void sgd(const SgdRun& run, std::size_t count, const SgdStep& step) {
    for (std::size_t begin = 0; begin < count; begin += kOperandBlock) {
        const std::int64_t length = block_length(begin, count);
        Block gradient(run.gradient, begin);
        Block weight(run.weight, begin);
        Block momentum(run.momentum, begin);
        float* const w = weight.read(length);
        float* const m = Momentum ? momentum.read(length) : nullptr;
        sgd_block<Momentum>(gradient.read(length), w, m, length, step);
        weight.write(w, length);
        if (Momentum) momentum.write(m, length);
        if (run.copy.data != nullptr) Block(run.copy, begin).write(w, length);
    }
}

}  // namespace
}  // namespace fusible::optimizer::FUSIBLE_LEVEL
