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
    const int all = (t.rows + kWholeRun - 1) / kWholeRun * kWholeRun;
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

/// The products of a group of keys with a panel of queries, of `depth` units.
inline void score(const Group& g, const std::int32_t* keys, std::ptrdiff_t stride, const Panel& queries, std::int64_t depth, float* sums) {
    queries.multiply(g.height, PackedRows{keys + g.row * stride, stride, 1}, {0, depth}, sums + g.row * kGradStride, kGradStride, false);
}

void differentiate(const GradientTile& t) {
    Group keys[kGradKeys / kGroupRows + 1];
    const int key_groups = make_groups(t.seers, t.keys, keys);
    if (key_groups == 0) return;
    begin_products();
    for (int p = 0; p * kNR < t.rows; ++p) {
        const Panel q(t.q_turned + p * t.depth * kNR, t.depth);
        const Panel o(t.o_turned + p * t.value_depth * kNR, t.value_depth);
        for (int i = 0; i < key_groups; ++i) {
            if (!meets(keys[i].keys, p * kNR, (p + 1) * kNR)) continue;
            score(keys[i], t.k, t.k_stride, q, t.depth, t.scores + p * kNR);
            score(keys[i], t.v, t.v_stride, o, t.value_depth, t.gradients + p * kNR);
        }
    }
    for (int key = 0; key < t.keys; key += kDepth) {
        const int group = key / kGroupRows * kGroupRows;
        const Span whole = widen(hull(t.seers + group, t.keys - group < kGroupRows ? t.keys - group : kGroupRows), kWholeRun);
        for (int d = 0; d < kDepth; ++d) hide(t, key + d, whole);
        differ(t, key, whole);
    }
    const std::int64_t row_units = (t.rows + kDepth - 1) / kDepth;
    for (int c = 0; c < t.value_panels; ++c) {
        const Panel o(t.o_across + c * t.across_stride, row_units);
        for (int i = 0; i < key_groups; ++i)
            multiply_span(keys[i], PackedRows{t.probabilities, kGradStride, 1}, o, t.dv + c * kNR, t.dv_stride);
    }
    for (int c = 0; c < t.panels; ++c) {
        const Panel q(t.q_across + c * t.across_stride, row_units);
        for (int i = 0; i < key_groups; ++i)
            multiply_span(keys[i], PackedRows{t.differences, kGradStride, 1}, q, t.dk + c * kNR, t.dk_stride);
    }
    Group rows[kGradRows / kGroupRows + 1];
    const int row_groups = make_groups(t.seen, t.rows, rows);
    const std::int64_t key_units = (t.keys + kDepth - 1) / kDepth;
    const PackedRows differences = as_left(t.differences_across, kGradStride, key_units, t.rows, t.scores);
    for (int c = 0; c < t.panels; ++c) {
        const Panel k(t.k_across + c * t.k_across_stride, key_units);
        for (int i = 0; i < row_groups; ++i) multiply_span(rows[i], differences, k, t.dq + c * kNR, t.dq_stride);
    }
    end_products();
}

}  // namespace
}  // namespace fusible::attention::FUSIBLE_LEVEL
