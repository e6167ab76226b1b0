// Formulae on blocks of matrices: operands widened to float32 in small buffers, results emitted from there.
#pragma once

#include "activation/gated.hpp"
#include "activation/kernels.hpp"
#include "cast/emit.hpp"

namespace fusible::activation::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;
using namespace cast::FUSIBLE_LEVEL;

template <class A>
void value(const Points& points, float* out, float*) {
    for (std::int64_t i = 0; i < points.count; i += kLanes) store(out + i, A::value(load(points.a + i)));
}

template <class A>
void gradient(const Points& points, float* out, float*) {
    for (std::int64_t i = 0; i < points.count; i += kLanes) store(out + i, A::gradient(load(points.grad + i), load(points.a + i)));
}

template <class A>
void gated_value(const Points& points, float* out, float*) {
    const A activation(points.parameters);
    for (std::int64_t i = 0; i < points.count; i += kLanes) store(out + i, activation.value(load(points.a + i), load(points.b + i)));
}

template <class A>
void gated_gradient(const Points& points, float* first, float* second) {
    const A activation(points.parameters);
    for (std::int64_t i = 0; i < points.count; i += kLanes) {
        F32 da;
        F32 db;
        activation.gradient(load(points.grad + i), load(points.a + i), load(points.b + i), da, db);
        store(first + i, da);
        store(second + i, db);
    }
}

/// Space for `Size` results, and for those that the last vector adds.
template <int Size>
struct Floats {
    alignas(64) float at[Size + kLanes];
};

template <class S>
inline void widen(const void* data, std::int64_t offset, std::int64_t stride, int rows, int cols, float* out) {
    for (int r = 0; r < rows; ++r, out += cols) {
        const S* source = static_cast<const S*>(data) + offset + r * stride;
        int i = 0;
        if (cols == cast::kTile)  // the next tile lies beside this one
            for (int c = 0; c < cast::kTile; c += kStep) prefetch_step(source + cast::kTile + c);
        for (; i + kLanes <= cols; i += kLanes) store(out + i, load(source + i));
        for (; i < cols; ++i) out[i] = to_float(source[i]);
    }
}

/// A block of an operand as consecutive float32, in `buffer` unless it lies so already; zeros make the last vector whole.
inline const float* read(const Operand& operand, std::int64_t row, std::int64_t col, int rows, int cols, float* buffer) {
    const std::int64_t offset = row * operand.stride + col;
    const int count = rows * cols;
    if (operand.kind == ElementKind::Float32 && rows == 1 && count % kLanes == 0) return static_cast<const float*>(operand.data) + offset;
    if (operand.kind == ElementKind::Float32)
        widen<float>(operand.data, offset, operand.stride, rows, cols, buffer);
    else if (operand.kind == ElementKind::Float16)
        widen<f16>(operand.data, offset, operand.stride, rows, cols, buffer);
    else
        widen<bf16>(operand.data, offset, operand.stride, rows, cols, buffer);
    for (int i = count; i % kLanes != 0; ++i) buffer[i] = 0.0f;
    return buffer;
}

/// The results of a block, its rows next to each other. A vector that ends beyond a row is overwritten by the next.
inline void compute(const ActivationJob& job, const Block& block, float* first, float* second) {
    Floats<kRun> grad;
    Floats<kRun> a;
    Floats<kRun> b;
    const int step = block.cols < kRun ? kRun / block.cols : 1;
    for (int r = 0; r < block.rows; r += step) {
        const int rows = block.rows - r < step ? block.rows - r : step;
        const std::int64_t row = block.row + r;
        const std::int64_t whole = (rows * block.cols + kLanes - 1) / kLanes * kLanes;
        Points points{nullptr, nullptr, nullptr, whole, job.parameters};
        if (job.grad.data != nullptr) points.grad = read(job.grad, row, block.col, rows, block.cols, grad.at);
        points.a = read(job.x, row, block.col, rows, block.cols, a.at);
        if (job.halves_in == 2) points.b = read(job.x, row, block.col + job.width, rows, block.cols, b.at);
        job.formula(points, first + r * block.cols, second + r * block.cols);
    }
}

inline std::int32_t larger(std::int32_t a, std::int32_t b) { return a < b ? b : a; }

std::int32_t run(const ActivationJob& job, const Block& block, float* column_sums) {
    Floats<kRun> results[2];
    compute(job, block, results[0].at, results[1].at);
    if (column_sums != nullptr) {
        float* const sums = column_sums + block.col;
        for (int r = 0; r < block.rows; ++r)
            for (int c = 0; c < block.cols; ++c) sums[c] += results[0].at[r * block.cols + c];
    }
    const std::int64_t cols = job.out.cols;
    if (job.halves_out == 1) return emit_run(job.out, results[0].at, block.row * cols + block.col, block.rows * block.cols);
    std::int32_t amax = 0;
    for (int r = 0; r < block.rows; ++r) {
        for (int half = 0; half < 2; ++half) {
            const std::int64_t offset = (block.row + r) * cols + half * job.width + block.col;
            amax = larger(amax, emit_run(job.out, results[half].at + r * block.cols, offset, block.cols));
        }
    }
    return amax;
}

std::int32_t tile(const ActivationJob& job, const Block& block, float* column_sums) {
    Floats<cast::kTile * cast::kTile> results[2];
    compute(job, block, results[0].at, results[1].at);
    std::int32_t amax = 0;
    for (int half = 0; half < job.halves_out; ++half) {
        const std::int64_t col = half * job.width + block.col;
        amax = larger(amax, emit_tile(job.out, results[half].at, block.cols, block.row, col, block.rows, block.cols, column_sums));
    }
    return amax;
}

}  // namespace
}  // namespace fusible::activation::FUSIBLE_LEVEL
