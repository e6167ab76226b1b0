// One step of Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) on a run of elements, in fp32.
#pragma once

#include "optimizer/block.hpp"

namespace fusible::optimizer::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Where a block of a step is written: over what was read, or beside it. Of a null weight none is computed.
struct Moved {
    float* weight;
    float* first;
    float* second;
};

/// Without decay no weight is read into the sums: an infinite one must not make them NaN.
template <Decay D>
inline void adam_block(const float* gradient, const float* weight, const float* first, const float* second, const Moved& moved, std::int64_t count,
                       const AdamStep& step) {
    each_vector(count, [=](std::int64_t i, auto lanes) {
        const F32 w = load(weight + i, lanes);
        F32 g = load(gradient + i, lanes);
        if constexpr (D == Decay::Gradient) g = fma(splat(step.weight_decay), w, g);
        const F32 m = fma(splat(step.one_minus_beta1), g, mul(splat(step.beta1), load(first + i, lanes)));
        const F32 v = fma(mul(splat(step.one_minus_beta2), g), g, mul(splat(step.beta2), load(second + i, lanes)));
        store(moved.first + i, m, lanes);
        store(moved.second + i, v, lanes);
        if (moved.weight == nullptr) return;
        const F32 root = add(sqrt(mul(v, splat(step.correction2))), splat(step.epsilon));
        F32 update = div(mul(m, splat(step.correction1)), root);
        if constexpr (D == Decay::Update) update = fma(splat(step.weight_decay), w, update);
        store(moved.weight + i, sub(w, mul(splat(step.lr), update)), lanes);
    });
}

/// Upper words become the numbers whose signed lower ones are `low`.
inline void add_words(float* values, const std::int16_t* low, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        const auto rest = static_cast<std::uint32_t>(static_cast<std::int32_t>(low[i]));
        values[i] = float_of(static_cast<std::int32_t>(static_cast<std::uint32_t>(bits_of(values[i])) + rest));
    }
}

/// The inverse of it.
inline void split_words(float* values, std::int16_t* low, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        const auto bits = static_cast<std::uint32_t>(bits_of(values[i]));
        low[i] = static_cast<std::int16_t>(bits & 0xffffu);
        values[i] = float_of(static_cast<std::int32_t>(bits - static_cast<std::uint32_t>(static_cast<std::int32_t>(low[i]))));
    }
}

/// The operands of a block of a run as fp32.
struct AdamOperands {
    AdamOperands(const AdamRun& run, std::size_t begin, std::int64_t count)
        : gradient(run.gradient, begin), weight(run.weight, begin), first(run.first, begin), second(run.second, begin) {
        g = gradient.read(count);
        w = weight.read(count);
        m = first.read(count);
        v = second.read(count);
        if (run.remainder != nullptr) add_words(w, run.remainder + begin, count);
    }

    Block gradient;
    Block weight;
    Block first;
    Block second;
    float* g;
    float* w;
    float* m;
    float* v;
};

template <Decay D>
void adam(const AdamRun& run, std::size_t count, const AdamStep& step) {
    for (std::size_t begin = 0; begin < count; begin += kOperandBlock) {
        const std::int64_t length = block_length(begin, count);
        AdamOperands of(run, begin, length);
        adam_block<D>(of.g, of.w, of.m, of.v, {of.w, of.m, of.v}, length, step);
        if (run.copy.data != nullptr) Block(run.copy, begin).write(of.w, length);
        if (run.remainder != nullptr) split_words(of.w, run.remainder + begin, length);
        of.weight.write(of.w, length);
        of.first.write(of.m, length);
        of.second.write(of.v, length);
    }
}

template <Decay D>
AdamAmaxes adam_amaxes(const AdamRun& run, std::size_t count, const AdamStep& step, bool of_weights) {
    AdamAmaxes amaxes{0, 0, 0};
    const auto include = [](std::int32_t& amax, const float* values, std::int64_t length) {
        const std::int32_t found = amax_of<float>(values, static_cast<std::size_t>(length));
        amax = found > amax ? found : amax;
    };
    for (std::size_t begin = 0; begin < count; begin += kOperandBlock) {
        const std::int64_t length = block_length(begin, count);
        const AdamOperands of(run, begin, length);
        alignas(64) float moved[3][kOperandBlock];
        adam_block<D>(of.g, of.w, of.m, of.v, {of_weights ? moved[2] : nullptr, moved[0], moved[1]}, length, step);
        include(amaxes.first, moved[0], length);
        include(amaxes.second, moved[1], length);
        if (of_weights) include(amaxes.weight, moved[2], length);
    }
    return amaxes;
}

}  // namespace
}  // namespace fusible::optimizer::FUSIBLE_LEVEL
