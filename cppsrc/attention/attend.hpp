// A tile of attention: scores, the online softmax (Milakov and Gimelshein 2018), and the values' sums, all in cache.
#pragma once

#include "attention/products.hpp"

namespace fusible::attention::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;
using namespace gemm::FUSIBLE_LEVEL;

constexpr float kLargeScore = 16.0f;

/// Makes exponentials relative to a new base: what a row has summed so far shrinks with it.
inline void rebase(const AttendTile& t, int row, float base) {
    const F32 factor = exp2(splat((t.base[row] - base) * kLog2E));
    t.base[row] = base;
    float* const sums = t.sums + row * kMaxLanes;
    for (int i = 0; i < kMaxLanes; i += kLanes) store(sums + i, mul(load(sums + i), factor));
    float* const out = t.out + row * t.out_stride;
    for (int i = 0; i < t.value_panels * kNR; i += kLanes) store(out + i, mul(load(out + i), factor));
}

/// Turns a row of scores into exponentials; `whole` (in whole vectors) is what the row's group reads of it.
inline void soften(const AttendTile& t, int row, Span whole) {
    float* const scores = t.scores + row * kScoreStride;
    std::int32_t* const probabilities = t.probabilities + row * kScoreStride;
    const Span seen = t.seen[row];
    const Span vectors = widen(seen, kLanes);
    for (int i = whole.begin; i < whole.end; i += kLanes)
        if (i < vectors.begin || i >= vectors.end) store_row(probabilities, i, splat(0.0f));
    if (is_empty(seen)) return;
    fill(scores, vectors.begin, seen.begin, hidden_score(t.scale));
    fill(scores, seen.end, vectors.end, hidden_score(t.scale));

    const F32 scale = splat(t.scale);
    F32 most[2] = {splat(-kInfinity), splat(-kInfinity)};
    for (int i = vectors.begin; i < vectors.end; i += kLanes) {
        most[0] = max(most[0], mul(load(scores + i), scale));
        i += kLanes;
        if (i < vectors.end) most[1] = max(most[1], mul(load(scores + i), scale));
    }
    const float largest = max_lanes(max(most[0], most[1]));
    if (largest > t.largest[row]) t.largest[row] = largest;
    if (largest > t.base[row]) rebase(t, row, largest);

    // The fused exponent rounds by an eps of the base, which must be small beside 1. Where scores are large, the base is subtracted from the scaled
    // score as it was compared with it: the largest one's exponential is then 1 to the bit, a row's sum neither 0 nor infinite, and its statistic what
    // the backward pass makes the same probabilities of.
    const float base = t.base[row] == -kInfinity ? 0.0f : t.base[row];
    const bool fused = base < kLargeScore && base > -kLargeScore;
    const F32 steep = splat(t.scale * kLog2E);
    const F32 shift = splat(base * -kLog2E);
    F32 sum = load(t.sums + row * kMaxLanes);
    for (int i = vectors.begin; i < vectors.end; i += kLanes) {
        F32 p = exp2(fused ? fma(load(scores + i), steep, shift) : mul(sub(mul(load(scores + i), scale), splat(base)), splat(kLog2E)));
        sum = add(sum, p);
        if (t.dropout.key != 0) p = mul(p, kept(t.dropout, t.counters[row] + static_cast<std::uint64_t>(i), 1));
        store_row(probabilities, i, p);
    }
    store(t.sums + row * kMaxLanes, sum);
}

/// Rows that go through a product together, and the keys that any of them sees.
struct Group {
    int row;
    int height;
    Span keys;
};

inline int make_groups(const Span* spans, int rows, Group* groups) {
    int count = 0;
    for (int row = 0; row < rows; row += kGroupRows) {
        const int height = rows - row < kGroupRows ? rows - row : kGroupRows;
        const Span keys = hull(spans + row, height);
        if (!is_empty(keys)) groups[count++] = {row, height, keys};
    }
    return count;
}

inline bool meets(Span span, int begin, int end) { return span.begin < end && span.end > begin; }

/// sums[r][c] += the product of a group's rows over the keys that it sees.
inline void multiply_span(const Group& g, const PackedRows& left, const Panel& right, float* sums, std::ptrdiff_t stride) {
    const PackedRows rows{left.units + g.row * left.row_stride, left.row_stride, left.unit_stride};
    right.multiply(g.height, rows, units_of(g.keys), sums + g.row * stride, stride, true);
}

void attend(const AttendTile& t) {
    begin_products();
    Group groups[kMaxBlockRows / kGroupRows + 1];
    const int count = make_groups(t.seen, t.rows, groups);
    for (int p = 0; p * kNR < t.keys; ++p) {
        const Panel keys(t.k + p * t.depth * kNR, t.depth);
        for (int i = 0; i < count; ++i) {
            const Group& g = groups[i];
            if (!meets(g.keys, p * kNR, (p + 1) * kNR)) continue;
            const PackedRows left{t.q + g.row * t.q_stride, t.q_stride, 1};
            keys.multiply(g.height, left, {0, t.depth}, t.scores + g.row * kScoreStride + p * kNR, kScoreStride, false);
        }
    }
    for (int i = 0; i < count; ++i)
        for (int r = 0; r < groups[i].height; ++r) soften(t, groups[i].row + r, widen(groups[i].keys, kWholeRun));
    for (int c = 0; c < t.value_panels; ++c) {
        const Panel values(t.v + c * t.v_stride, (t.keys + kDepth - 1) / kDepth);
        for (int i = 0; i < count; ++i)
            multiply_span(groups[i], PackedRows{t.probabilities, kScoreStride, 1}, values, t.out + c * kNR, t.out_stride);
    }
    end_products();
}

}  // namespace
}  // namespace fusible::attention::FUSIBLE_LEVEL
