// Softmax of one row and its gradient, in fp32.
#pragma once

#include "simd/each.hpp"
#include "softmax/kernels.hpp"

namespace fusible::softmax::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr std::int32_t kMinusInfinityBits = static_cast<std::int32_t>(0xff800000u);

inline F32 with_rest(F32 value, Whole, float) { return value; }

/// `rest` in the lanes that are no elements.
inline F32 with_rest(F32 value, Part part, float rest) {
    float lanes[kLanes];
    store(lanes, value);
    for (int i = part.lanes; i < kLanes; ++i) lanes[i] = rest;
    return load(lanes);
}

inline float largest_lane(F32 value) {
    float lanes[kLanes];
    store(lanes, value);
    float largest = lanes[0];
    for (int i = 1; i < kLanes; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

template <class Lanes>
inline F32 replace_masked(F32 score, const std::uint8_t* mask, Lanes lanes) {
    std::uint8_t flags[kLanes] = {};
    std::memcpy(flags, mask, static_cast<std::size_t>(lanes.count()));
    const F32 distance = abs(sub(from_int(load_bytes(flags)), splat(1.0f)));
    return select_less(distance, splat(0.5f), splat(kMaskedScore), score);
}

/// Writes the scores to the scratch, as whole vectors that end in -inf, and returns their maximum (NaN does not take part in it).
template <class S, bool Masked>
inline float prepare(const SoftmaxRow& row) {
    const float lowest = float_of(kMinusInfinityBits);
    const S* source = static_cast<const S*>(row.source);
    F32 largest = splat(lowest);
    each_vector(row.visible, [&](std::int64_t i, auto lanes) {
        F32 score = mul(load(source + i, lanes), splat(row.scale));
        if constexpr (Masked) score = replace_masked(score, row.mask + i, lanes);
        score = with_rest(score, lanes, lowest);
        largest = max(score, largest);
        store(row.scratch + i, score);
    });
    return largest_lane(largest);
}

/// What the next row reads and what this one writes is fetched in time: rows that a causal mask ends early are too short for a CPU to follow by
/// itself, and took twice as long without (Zen 5, [4, 1024, 1024] float32).
template <class S>
inline void prefetch_read([[maybe_unused]] const S* source) {
#if defined(__GNUC__)
    __builtin_prefetch(source, 0, 2);
#endif
}

template <class S>
inline void prefetch_write([[maybe_unused]] S* out) {
#if defined(__GNUC__)
    __builtin_prefetch(out, 1, 2);
#endif
}

template <class S>
inline void clear(S* out, std::int64_t begin, std::int64_t end) {
    each_vector(end - begin, [=](std::int64_t i, auto lanes) { store(out + begin + i, splat(0.0f), lanes); });
}

template <class S, bool Masked>
void forward(const SoftmaxRow& row) {
    S* out = static_cast<S*>(row.out);
    const float largest = prepare<S, Masked>(row);
    F32 sum = splat(0.0f);
    const S* next = static_cast<const S*>(row.source) + row.width;
    for (std::int64_t i = 0; i < row.visible; i += kLanes) {
        prefetch_read(next + i);
        prefetch_write(out + i);
        const F32 power = exp(sub(load(row.scratch + i), splat(largest)));
        sum = add(sum, power);
        store(row.scratch + i, power);
    }
    const float total = sum_lanes(sum);
    // A NaN among the scores shows in the sum alone.
    const bool hidden = row.visible == 0 || (Masked && largest == kMaskedScore && total == total);
    clear(out, hidden ? 0 : row.visible, row.width);
    if (hidden) return;
    const F32 factor = splat(1.0f / total);
    each_vector(row.visible, [&](std::int64_t i, auto lanes) { store(out + i, mul(load(row.scratch + i), factor), lanes); });
}

/// dx = scale y (g - sum(y g)).
template <class S>
void backward(const SoftmaxGradientRow& row) {
    const S* grads = static_cast<const S*>(row.grads);
    const S* results = static_cast<const S*>(row.results);
    S* out = static_cast<S*>(row.out);
    F32 sum = splat(0.0f);
    each_vector(row.visible, [&](std::int64_t i, auto lanes) {
        prefetch_read(grads + row.width + i);
        prefetch_read(results + row.width + i);
        prefetch_write(out + i);
        sum = fma(load(grads + i, lanes), load(results + i, lanes), sum);
    });
    const F32 mean = splat(sum_lanes(sum));
    each_vector(row.visible, [&](std::int64_t i, auto lanes) {
        const F32 centered = sub(load(grads + i, lanes), mean);
        store(out + i, mul(splat(row.scale), mul(load(results + i, lanes), centered)), lanes);
    });
    clear(out, row.visible, row.width);
}

}  // namespace
}  // namespace fusible::softmax::FUSIBLE_LEVEL
