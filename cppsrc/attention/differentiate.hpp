// A tile of attention's gradients: scores and probabilities are computed again, keys down and queries along, and all five products are made.
#pragma once

#include "attention/attend.hpp"

namespace fusible::attention::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Hides the scores of a key from the rows of `whole` that do not see it.
inline void hide(const GradientTile& t, int key, Span whole) {
    const Span seers = t.seers[key];
    float* const scores = t.scores + key * kGradStride;
    const float hidden = hidden_score(t.scale);
    if (is_empty(seers)) {
        fill(scores, whole.begin, whole.end, hidden);
        fill(t.gradients + key * kGradStride, whole.begin, whole.end, 0.0f);
    } else {
        fill(scores, whole.begin, seers.begin, hidden);
        fill(scores, seers.end, whole.end, hidden);
    }
}

/// p = exp(s - stats), ds = p (dp - delta), of a unit of keys and the rows of `whole`; ds is 0 beside it.
///
/// A row's statistic is subtracted from the scaled score, which is rounded as the forward pass rounded it: a fused exponent would be off by an eps of the
/// statistic, and no sum of the row makes that good here. It costs nothing measurable.
inline void differ(const GradientTile& t, int first, Span whole) {
    const F32 scale = splat(t.scale);
    std::int32_t* const across = t.differences_across + first / kDepth * kGradStride;
    const F32 none[kDepth] = {};
    const int all = (t.rows + kLanes - 1) / kLanes * kLanes;
    for (int i = 0; i < whole.begin; i += kLanes) store_across(across + i, none);
    for (int i = whole.end; i < all; i += kLanes) store_across(across + i, none);
    for (int i = whole.begin; i < whole.end; i += kLanes) {
        const F32 stats = load(t.stats + i);
        const F32 delta = load(t.delta + i);
        F32 differences[kDepth];
        for (int d = 0; d < kDepth; ++d) {
            const std::ptrdiff_t row = (first + d) * kGradStride;
            F32 p = exp2(mul(sub(mul(load(t.scores + row + i), scale), stats), splat(kLog2E)));
            F32 dp = load(t.gradients + row + i);
            F32 dropped = p;
            if (t.dropout.key != 0) {
                const std::uint64_t counter = t.counter + static_cast<std::uint64_t>(i) * t.dropout.width + static_cast<std::uint64_t>(first + d);
                const F32 factor = kept(t.dropout, counter, t.dropout.width);
                dropped = mul(p, factor);
                dp = mul(dp, factor);
            }
            differences[d] = mul(p, sub(dp, delta));
            store_row(t.probabilities + row, i, dropped);
            store_row(t.differences + row, i, differences[d]);
        }
        store_across(across + i, differences);
    }
}

inline void score(const GradientTile& t, const Group& g, int panel) {
    const std::ptrdiff_t at = g.row * kGradStride + panel * kNR;
    const PackedRows k{t.k + g.row * t.k_stride, t.k_stride, 1};
    multiply_last(g.height, k, t.q_turned + panel * t.depth * kNR, t.depth, t.scores + at, kGradStride, false);
    const PackedRows v{t.v + g.row * t.v_stride, t.v_stride, 1};
    multiply_last(g.height, v, t.o_turned + panel * t.value_depth * kNR, t.value_depth, t.gradients + at, kGradStride, false);
}

void differentiate(const GradientTile& t) {
    Group keys[kGradKeys / kMR + 1];
    const int key_groups = make_groups(t.seers, t.keys, keys);
    if (key_groups == 0) return;
    for (int p = 0; p * kNR < t.rows; ++p)
        for (int i = 0; i < key_groups; ++i)
            if (meets(keys[i].keys, p * kNR, (p + 1) * kNR)) score(t, keys[i], p);
    for (int key = 0; key < t.keys; key += kDepth) {
        const int group = key / kMR * kMR;
        const Span whole = widen(hull(t.seers + group, t.keys - group < kMR ? t.keys - group : kMR), kLanes);
        for (int d = 0; d < kDepth; ++d) hide(t, key + d, whole);
        differ(t, key, whole);
    }
    for (int c = 0; c < t.value_panels; ++c)
        for (int i = 0; i < key_groups; ++i)
            multiply_span(keys[i], PackedRows{t.probabilities, kGradStride, 1}, t.o_across + c * t.across_stride, t.dv + c * kNR, t.dv_stride);
    for (int c = 0; c < t.panels; ++c)
        for (int i = 0; i < key_groups; ++i)
            multiply_span(keys[i], PackedRows{t.differences, kGradStride, 1}, t.q_across + c * t.across_stride, t.dk + c * kNR, t.dk_stride);
    Group rows[kGradRows / kMR + 1];
    const int row_groups = make_groups(t.seen, t.rows, rows);
    for (int c = 0; c < t.panels; ++c)
        for (int i = 0; i < row_groups; ++i)
            multiply_span(rows[i], PackedRows{t.differences_across, 1, kGradStride}, t.k_across + c * t.k_across_stride, t.dq + c * kNR, t.dq_stride);
}

}  // namespace
}  // namespace fusible::attention::FUSIBLE_LEVEL
