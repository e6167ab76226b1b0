// Gradients of LayerNorm and RMSNorm: the means of each row, then dx and the sums over rows from a second pass.
#pragma once

#include "norm/forward.hpp"

namespace fusible::norm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// What the gradient of a row needs, in every lane: `mean` of dy, and `slope` the negated mean of dy xh.
struct RowGradient {
    F32 mu;
    F32 rsigma;
    F32 mean;
    F32 slope;
};

template <class P, class X, class Z>
inline RowGradient row_gradient(const NormBackward& job, std::int64_t r) {
    const X* x = static_cast<const X*>(job.x) + r * job.cols;
    const Z* dz = static_cast<const Z*>(job.dz) + r * job.cols;
    const float rsigma = job.rsigma[r];
    const auto width = static_cast<float>(job.cols);
    F32 mu = splat(0.0f);
    if constexpr (P::kCentered) mu = splat(job.mu[r]);
    float totals[2];
    sum_row(job.cols, totals, [&](std::int64_t i, auto lanes, F32(&sums)[2]) {
        const F32 dy = mul(lanes.read(dz + i), lanes.read(job.gamma + i));
        if constexpr (P::kCentered) sums[0] = add(sums[0], dy);
        sums[1] = fma(dy, P::center(lanes.read(x + i), mu), sums[1]);
    });
    return {mu, splat(rsigma), splat(totals[0] / width), splat(-(totals[1] / width) * rsigma)};
}

constexpr int kRows = 4;
constexpr std::int64_t kAdded = 256;

/// Rows [first, first + Rows) together: gamma and the sums over rows are read, and written, once for all of them.
template <class P, class X, class Z, int Rows>
inline void backward_rows(const NormBackward& job, std::int64_t first, float* sums) {
    const X* x = static_cast<const X*>(job.x) + first * job.cols;
    const Z* dz = static_cast<const Z*>(job.dz) + first * job.cols;
    X* dx = static_cast<X*>(job.dx) + first * job.cols;
    RowGradient rows[Rows];
    alignas(64) float added[Rows][kAdded];
    for (int r = 0; r < Rows; ++r) rows[r] = row_gradient<P, X, Z>(job, first + r);
    for (std::int64_t c = 0; c < job.cols; c += kAdded) {
        const std::int64_t end = job.cols - c < kAdded ? job.cols : c + kAdded;
        if (job.add != nullptr)
            for (int r = 0; r < Rows; ++r) widen(job.add_kind, job.add, (first + r) * job.cols + c, end - c, 0.0f, added[r]);
        for_vectors(c, end, [&](std::int64_t i, auto lanes) {
            const F32 gamma = lanes.read(job.gamma + i);
            F32 dgamma = lanes.read(sums + i);
            F32 dbeta = splat(0.0f);
            for (int r = 0; r < Rows; ++r) {
                const RowGradient& row = rows[r];
                if constexpr (sizeof(X) < sizeof(float)) prefetch(x + (r + Rows) * job.cols + i);
                if constexpr (sizeof(Z) < sizeof(float)) prefetch(dz + (r + Rows) * job.cols + i);
                const F32 z = lanes.read(dz + r * job.cols + i);
                const F32 xh = mul(P::center(lanes.read(x + r * job.cols + i), row.mu), row.rsigma);
                dgamma = fma(z, xh, dgamma);
                dbeta = add(dbeta, z);
                F32 gradient = mul(row.rsigma, fma(row.slope, xh, P::center(mul(z, gamma), row.mean)));
                if (job.add != nullptr) gradient = add(gradient, lanes.read(added[r] + (i - c)));
                lanes.write(dx + r * job.cols + i, gradient);
            }
            lanes.write(sums + i, dgamma);
            if constexpr (P::kCentered) lanes.write(sums + job.cols + i, add(lanes.read(sums + job.cols + i), dbeta));
        });
    }
}

template <class P, class X, class Z>
void backward(const NormBackward& job, std::int64_t begin, std::int64_t end, float* sums) {
    std::int64_t r = begin;
    for (; r + kRows <= end; r += kRows) backward_rows<P, X, Z, kRows>(job, r, sums);
    for (; r < end; ++r) backward_rows<P, X, Z, 1>(job, r, sums);
}

}  // namespace
}  // namespace fusible::norm::FUSIBLE_LEVEL
