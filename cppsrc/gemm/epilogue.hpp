// The end of a product: sums in cache are scaled, added to, activated, and rounded once.
#pragma once

#include "activation/gelu.hpp"
#include "cast/emit.hpp"
#include "gemm/kernels.hpp"

namespace fusible {
namespace FUSIBLE_LEVEL {
namespace {

template <class S>
inline void read_run(const S* source, std::int64_t count, float* out) {
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, load(source + i));
    for (; i < count; ++i) out[i] = to_float(source[i]);
}

/// Elements of a wide kind that begin at `offset`, as floats.
inline void read_run(int kind, const void* source, std::int64_t offset, std::int64_t count, float* out) {
    if (kind == 0) return read_run(static_cast<const float*>(source) + offset, count, out);
    if (kind == 1) return read_run(static_cast<const f16*>(source) + offset, count, out);
    read_run(static_cast<const bf16*>(source) + offset, count, out);
}

/// values[i] = step(i, values[i]) over a row of a tile, in whole vectors: the sums are padded to them.
template <class Step>
inline void for_vectors(float* values, int count, const Step& step) {
    for (int i = 0; i < count; i += kLanes) store(values + i, step(i, load(values + i)));
}

/// One row of a tile, up to kTile values.
inline void finish_row(const Epilogue& e, float* values, int count, std::int64_t row, std::int64_t col) {
    alignas(64) float other[kTile] = {};
    const std::int64_t offset = row * e.out.cols + col;
    const F32 scale = splat(e.scale);
    for_vectors(values, count, [&](int, F32 v) { return mul(v, scale); });
    if (e.beta != 0.0f) {
        read_run(e.addend_kind, e.addend, offset, count, other);
        for_vectors(values, count, [&](int i, F32 v) { return fma(splat(e.beta), load(other + i), v); });
    }
    if (e.bias != nullptr) {
        read_run(e.bias_kind, e.bias, col, count, other);
        for_vectors(values, count, [&](int i, F32 v) { return add(v, load(other + i)); });
    }
    if (e.gelu == GeluStep::None) return;
    if (e.gelu == GeluStep::Multiply) {
        read_run(e.pre_kind, e.pre, offset, count, other);
        for_vectors(values, count, [&](int i, F32 v) { return mul(v, Gelu::slope(load(other + i))); });
        return;
    }
    if (e.pre != nullptr) emit_run(Output{e.pre_kind, e.pre, nullptr, e.out.rows, e.out.cols, 1.0f}, values, offset, count);
    for_vectors(values, count, [&](int, F32 v) { return Gelu::value(v); });
}

inline std::int32_t finish_block(const Epilogue& e, const FinishedBlock& b) {
    std::int32_t amax = 0;
    for (int r = 0; r < b.rows; r += kTile) {
        const int rows = b.rows - r < kTile ? b.rows - r : kTile;
        for (int c = 0; c < b.cols; c += kTile) {
            const int cols = b.cols - c < kTile ? b.cols - c : kTile;
            float* const tile = b.sums + r * b.sums_stride + c;
            for (int i = 0; i < rows; ++i) finish_row(e, tile + i * b.sums_stride, cols, b.row + r + i, b.col + c);
            const std::int32_t found = emit_tile(e.out, tile, b.sums_stride, b.row + r, b.col + c, rows, cols, b.column_sums);
            amax = found > amax ? found : amax;
        }
    }
    return amax;
}

}  // namespace
}  // namespace FUSIBLE_LEVEL
}  // namespace fusible
