// LayerNorm and RMSNorm of rows: statistics in two passes over a row in cache, then fp32 results, emitted in runs or tiles.
#pragma once

#include "cast/emit.hpp"
#include "norm/kernels.hpp"
#include "norm/vectors.hpp"

namespace fusible::norm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;
using namespace cast::FUSIBLE_LEVEL;

/// What sets the norms apart: LayerNorm subtracts the mean and adds a bias.
struct LayerNorm {
    static constexpr bool kCentered = true;

    static F32 center(F32 x, F32 mu) { return sub(x, mu); }
    static F32 shift(F32 product, F32 gamma, F32 beta) { return fma(product, gamma, beta); }
};

struct RmsNorm {
    static constexpr bool kCentered = false;

    static F32 center(F32 x, F32) { return x; }
    static F32 shift(F32 product, F32 gamma, F32) { return mul(product, gamma); }
};

struct Statistics {
    float mu;
    float rsigma;
};

/// Statistics of row r, written to the job as well. The mean comes first: E[x^2] - E[x]^2 would cancel.
template <class P, class X>
inline Statistics statistics(const NormForward& job, std::int64_t r) {
    const std::int64_t cols = job.out.cols;
    const X* row = static_cast<const X*>(job.x) + r * cols;
    const auto width = static_cast<double>(cols);
    float total[1];
    float mu = 0.0f;
    if constexpr (P::kCentered) {
        sum_row(cols, total, [&](std::int64_t i, auto lanes, F32(&sums)[1]) { sums[0] = add(sums[0], lanes.read(row + i)); });
        mu = static_cast<float>(static_cast<double>(total[0]) / width);
        job.mu[r] = mu;
    }
    const F32 mean = splat(mu);
    sum_row(cols, total, [&](std::int64_t i, auto lanes, F32(&sums)[1]) {
        const F32 deviation = lanes.kept(P::center(lanes.read(row + i), mean));
        sums[0] = fma(deviation, deviation, sums[0]);
    });
    job.rsigma[r] = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(total[0]) / width + job.eps));
    return {mu, job.rsigma[r]};
}

/// Columns [c, c + count) of row r, normalized, into `out`.
template <class P, class X>
inline void normalize(const NormForward& job, std::int64_t r, std::int64_t c, std::int64_t count, Statistics row, float* out) {
    const X* x = static_cast<const X*>(job.x) + r * job.out.cols + c;
    const F32 mu = splat(row.mu);
    const F32 rsigma = splat(row.rsigma);
    for_vectors(0, count, [&](std::int64_t i, auto lanes) {
        prefetch(x + i + job.out.cols);
        const F32 scaled = mul(P::center(lanes.read(x + i), mu), rsigma);
        F32 beta{};
        if constexpr (P::kCentered) beta = lanes.read(job.beta + c + i);
        lanes.write(out + i, P::shift(scaled, lanes.read(job.gamma + c + i), beta));
    });
}

inline std::int32_t larger(std::int32_t a, std::int32_t b) { return a > b ? a : b; }

constexpr std::int64_t kEmitted = 1024;

/// Results are emitted kEmitted at a time, whatever the length of a row: only the last run is ragged.
template <class P, class X>
std::int32_t forward(const NormForward& job, std::int64_t begin, std::int64_t end) {
    alignas(64) float run[kEmitted];
    const std::int64_t cols = job.out.cols;
    std::int64_t offset = begin * cols;
    std::int64_t filled = 0;
    std::int32_t amax = 0;
    for (std::int64_t r = begin; r < end; ++r) {
        const Statistics row = statistics<P, X>(job, r);
        for (std::int64_t c = 0; c < cols;) {
            const std::int64_t count = cols - c < kEmitted - filled ? cols - c : kEmitted - filled;
            normalize<P, X>(job, r, c, count, row, run + filled);
            c += count;
            filled += count;
            if (filled < kEmitted && (c < cols || r + 1 < end)) continue;
            amax = larger(amax, emit_run(job.out, run, offset, filled));
            offset += filled;
            filled = 0;
        }
    }
    return amax;
}

template <class P, class X>
std::int32_t forward_transposed(const NormForward& job, std::int64_t begin, std::int64_t end) {
    alignas(64) float tile[cast::kTile * cast::kTile];
    Statistics rows[cast::kTile];
    const auto height = static_cast<int>(end - begin);
    const std::int64_t cols = job.out.cols;
    for (int r = 0; r < height; ++r) rows[r] = statistics<P, X>(job, begin + r);
    std::int32_t amax = 0;
    for (std::int64_t c = 0; c < cols; c += cast::kTile) {
        const auto width = static_cast<int>(cols - c < cast::kTile ? cols - c : cast::kTile);
        for (int r = 0; r < height; ++r) normalize<P, X>(job, begin + r, c, width, rows[r], tile + r * cast::kTile);
        amax = larger(amax, emit_tile(job.out, tile, cast::kTile, begin, c, height, width, nullptr));
    }
    return amax;
}

}  // namespace
}  // namespace fusible::norm::FUSIBLE_LEVEL
