// One step of Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) on a run of elements, in fp32.
#pragma once

#include "optimizer/block.hpp"

namespace fusible::optimizer::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Without decay no weight is read into the sums: an infinite one must not make them NaN.
template <Decay D>
inline void adam_block(const float* gradient, float* weight, float* first, float* second, std::int64_t count, const AdamStep& step) {
    each_vector(count, [=](std::int64_t i, auto lanes) {
        const F32 w = load(weight + i, lanes);
        F32 g = load(gradient + i, lanes);
        if constexpr (D == Decay::Gradient) g = fma(splat(step.weight_decay), w, g);
        const F32 m = fma(splat(step.one_minus_beta1), g, mul(splat(step.beta1), load(first + i, lanes)));
        const F32 v = fma(mul(splat(step.one_minus_beta2), g), g, mul(splat(step.beta2), load(second + i, lanes)));
        const F32 root = add(sqrt(mul(v, splat(step.correction2))), splat(step.epsilon));
        F32 update = div(mul(m, splat(step.correction1)), root);
        if constexpr (D == Decay::Update) update = fma(splat(step.weight_decay), w, update);
        store(first + i, m, lanes);
        store(second + i, v, lanes);
        store(weight + i, sub(w, mul(splat(step.lr), update)), lanes);
    });
}

template <Decay D>
void adam(const AdamRun& run, std::size_t count, const AdamStep& step) {
    for (std::size_t begin = 0; begin < count; begin += kOperandBlock) {
        const auto length = static_cast<std::int64_t>(count - begin < kOperandBlock ? count - begin : kOperandBlock);
        Block gradient(run.gradient, run.gradient_kind, begin);
        Block weight(run.weight, run.weight_kind, begin);
        Block first(run.first, run.first_kind, begin);
        Block second(run.second, run.second_kind, begin);
        float* const w = weight.read(length);
        float* const m = first.read(length);
        float* const v = second.read(length);
        adam_block<D>(gradient.read(length), w, m, v, length, step);
        weight.write(w, length);
        first.write(m, length);
        second.write(v, length);
        if (run.copy != nullptr) Block(run.copy, run.copy_kind, begin).write(w, length);
    }
}

}  // namespace
}  // namespace fusible::optimizer::FUSIBLE_LEVEL
