// The last step of a producer: its fp32 results, still in cache, become what was asked for. Returned are the bits of max |value| of codes.
#pragma once

#include "cast/output.hpp"
#include "cast/strips.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

template <class S>
inline void store_run(const float* values, S* out, std::int64_t count) {
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, load(values + i));
    for (; i < count; ++i) from_float(values[i], out[i]);
}

/// `count` values that begin at element `offset` of the matrix read row by row; where no transposed copy is wanted.
[[maybe_unused]] inline std::int32_t emit_run(const Output& out, const float* values, std::int64_t offset, std::int64_t count) {
    const auto length = static_cast<std::size_t>(count);
    switch (out.kind) {
        case ElementKind::Float32:
            store_run(values, static_cast<float*>(out.data) + offset, count);
            return 0;
        case ElementKind::Float16:
            store_run(values, static_cast<f16*>(out.data) + offset, count);
            return 0;
        case ElementKind::BFloat16:
            store_run(values, static_cast<bf16*>(out.data) + offset, count);
            return 0;
        case ElementKind::E4M3:
            return quantize<float, E4M3>(values, static_cast<std::uint8_t*>(out.data) + offset, length, out.scale);
        default:
            return quantize<float, E5M2>(values, static_cast<std::uint8_t*>(out.data) + offset, length, out.scale);
    }
}

/// A tile of rows x cols <= kTile x kTile values, `stride` apart, that belongs at (row, col); a transposed copy is written where there is one.
/// `column_sums` (of the whole matrix, or null) are added to, from the values as they are.
[[maybe_unused]] inline std::int32_t emit_tile(const Output& out, const float* values, std::ptrdiff_t stride, std::int64_t row, std::int64_t col,
                                               int rows, int cols, float* column_sums) {
    if (!is_wide(out.kind)) {
        StripArguments strip{};
        strip.source = values;
        strip.source_stride = stride;
        strip.rows = rows;
        strip.cols = cols;
        strip.scale = out.scale;
        strip.codes = out.data != nullptr ? static_cast<std::uint8_t*>(out.data) + row * out.cols + col : nullptr;
        strip.codes_stride = out.cols;
        strip.transposed = out.transposed != nullptr ? out.transposed + col * out.rows + row : nullptr;
        strip.transposed_stride = out.rows;
        strip.column_sums = column_sums != nullptr ? column_sums + col : nullptr;
        return out.kind == ElementKind::E4M3 ? quantize_strip<float, E4M3>(strip) : quantize_strip<float, E5M2>(strip);
    }
    for (int r = 0; r < rows; ++r) {
        const float* source = values + r * stride;
        emit_run(out, source, (row + r) * out.cols + col, cols);
        if (column_sums != nullptr)
            for (int c = 0; c < cols; ++c) column_sums[col + c] += source[c];
    }
    return 0;
}

}  // namespace
}  // namespace fusible::cast::FUSIBLE_LEVEL
