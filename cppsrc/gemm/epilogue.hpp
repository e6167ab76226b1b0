// The end of a product: sums in cache are scaled, added to, activated, and rounded once.
#pragma once

#include "activation/gelu.hpp"
#include "cast/emit.hpp"
#include "gemm/kernels.hpp"

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;
using namespace activation::FUSIBLE_LEVEL;
using namespace cast::FUSIBLE_LEVEL;

/// Rows ahead that an epilogue fetches: what it reads lies a matrix row apart, and no CPU foresees that.
constexpr std::int64_t kRowsAhead = 4;

template <class S>
inline F32 read_vector(const void* source, std::int64_t at, int count, std::int64_t ahead = 0) {
    const S* from = static_cast<const S*>(source) + at;
    if (ahead != 0) __builtin_prefetch(from + ahead, 0, 2);
    return count == kLanes ? load(from) : load_first(from, static_cast<std::size_t>(count));
}

template <class S>
inline void write_vector(void* out, std::int64_t at, F32 value, int count) {
    S* to = static_cast<S*>(out) + at;
    if (count == kLanes)
        store(to, value);
    else
        store_first(to, value, static_cast<std::size_t>(count));
}

/// `count` <= kLanes elements of a wide kind, as floats.
inline F32 read_vector(ElementKind kind, const void* source, std::int64_t at, int count, std::int64_t ahead = 0) {
    if (kind == ElementKind::BFloat16) return read_vector<bf16>(source, at, count, ahead);
    return kind == ElementKind::Float32 ? read_vector<float>(source, at, count, ahead) : read_vector<f16>(source, at, count, ahead);
}

inline void write_vector(ElementKind kind, void* out, std::int64_t at, F32 value, int count) {
    if (kind == ElementKind::BFloat16) return write_vector<bf16>(out, at, value, count);
    kind == ElementKind::Float32 ? write_vector<float>(out, at, value, count) : write_vector<f16>(out, at, value, count);
}

/// The result for `count` sums that belong at (row, col).
inline F32 finish_vector(const Epilogue& e, F32 sum, std::int64_t row, std::int64_t col, int count) {
    const std::int64_t at = row * e.out.cols + col;
    F32 value = mul(sum, splat(e.scale));
    if (e.beta != 0.0f) value = fma(splat(e.beta), read_vector(e.addend_kind, e.addend, at, count, kRowsAhead * e.out.cols), value);
    if (e.bias != nullptr) value = add(value, read_vector(e.bias_kind, e.bias, col, count));
    if (e.gelu == GeluStep::None) return value;
    if (e.gelu == GeluStep::Multiply) return mul(value, Gelu::slope(read_vector(e.pre_kind, e.pre, at, count, kRowsAhead * e.out.cols)));
    if (e.pre != nullptr) write_vector(e.pre_kind, e.pre, at, value, count);
    return Gelu::value(value);
}

/// Calls `put(c, value, count)` for the vectors of a row of sums. What is read beyond the row is within the sums, which are whole vectors wide.
template <class Put>
inline void finish_row(const Epilogue& e, const float* sums, std::int64_t row, std::int64_t col, int cols, const Put& put) {
    int c = 0;
    for (; c + kLanes <= cols; c += kLanes) put(c, finish_vector(e, load(sums + c), row, col + c, kLanes), kLanes);
    if (c < cols) put(c, finish_vector(e, load(sums + c), row, col + c, cols - c), cols - c);
}

/// Scaled sums and nothing else, which is most products: `count` of them, without a question a vector.
template <class S>
inline void scale_run(const float* sums, float scale, S* out, int count) {
    const F32 factor = splat(scale);
    int c = 0;
    for (; c + kLanes <= count; c += kLanes) store(out + c, mul(load(sums + c), factor));
    if (c < count) store_first(out + c, mul(load(sums + c), factor), static_cast<std::size_t>(count - c));
}

/// Wide results, straight from the registers.
template <class S>
inline void finish_wide(const Epilogue& e, const FinishedBlock& b) {
    const bool scales_only = e.beta == 0.0f && e.bias == nullptr && e.gelu == GeluStep::None;
    for (int r = 0; r < b.rows; ++r) {
        const float* const sums = b.sums + r * b.sums_stride;
        S* const out = static_cast<S*>(e.out.data) + (b.row + r) * e.out.cols + b.col;
        if (scales_only)
            scale_run(sums, e.scale, out, b.cols);
        else
            finish_row(e, sums, b.row + r, b.col, b.cols, [&](int c, F32 value, int count) { write_vector<S>(out, c, value, count); });
    }
}

inline void finish_wide(const Epilogue& e, const FinishedBlock& b) {
    if (e.out.kind == ElementKind::BFloat16) return finish_wide<bf16>(e, b);
    e.out.kind == ElementKind::Float32 ? finish_wide<float>(e, b) : finish_wide<f16>(e, b);
}

inline std::int32_t finish_block(const Epilogue& e, const FinishedBlock& b) {
    if (is_wide(e.out.kind) && b.column_sums == nullptr) return finish_wide(e, b), 0;
    std::int32_t amax = 0;
    for (int r = 0; r < b.rows; r += cast::kTile) {
        const int rows = b.rows - r < cast::kTile ? b.rows - r : cast::kTile;
        float* const sums = b.sums + r * b.sums_stride;
        for (int i = 0; i < rows; ++i) {  // whole rows: what the epilogue reads is read in long runs
            float* const row = sums + i * b.sums_stride;
            finish_row(e, row, b.row + r + i, b.col, b.cols, [&](int c, F32 value, int) { store(row + c, value); });
        }
        for (int c = 0; c < b.cols; c += cast::kTile) {
            const int cols = b.cols - c < cast::kTile ? b.cols - c : cast::kTile;
            const std::int32_t found = emit_tile(e.out, sums + c, b.sums_stride, b.row + r, b.col + c, rows, cols, b.column_sums);
            amax = found > amax ? found : amax;
        }
    }
    return amax;
}

}  // namespace
}  // namespace fusible::gemm::FUSIBLE_LEVEL
