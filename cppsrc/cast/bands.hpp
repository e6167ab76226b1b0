// What formats in blocks share: the copies that a call asks for, checked, and the loop over bands of a matrix.
#pragma once

#include <algorithm>
#include <type_traits>

#include "runtime/checks.hpp"
#include "runtime/threads.hpp"

namespace fusible::cast {

constexpr std::int64_t kBandCols = 1024;  // of a task

/// One scale for each block, fp32 or a byte (`bytes` says of which types), in a matrix that may have more lines and columns.
template <class Scale>
void check_scales(const TensorView& view, const char* name, std::int64_t lines, std::int64_t blocks, const char* bytes = "uint8 or float8_e8m0fnu") {
    if constexpr (std::is_same_v<Scale, float>)
        check_dtype(view, name, view.dtype == DType::Float32, "float32");
    else
        check_dtype(view, name, size_of(view.dtype) == 1, bytes);
    if (view.ndim == 2 && view.shape[0] >= lines && view.shape[1] >= blocks) return;
    throw ShapeError(expected("a matrix of at least " + std::to_string(lines) + " x " + std::to_string(blocks), name, view.shape_text(),
                              "pass one for each block"));
}

template <class Scale>
struct Copy {
    std::uint8_t* codes = nullptr;
    Scale* scales = nullptr;
    std::int64_t stride = 0;  // of the scales
};

template <class Scale>
Copy<Scale> read_copy(const OptionalView& codes, const char* name, const OptionalView& scales, const char* scales_name, DType fp8_dtype,
                      std::int64_t count, std::int64_t lines, std::int64_t blocks) {
    if (!codes && !scales) return {};
    if (!codes || !scales) throw ArgumentError(expected(std::string("codes and their ") + (std::is_same_v<Scale, float> ? "scales" : "exponents"),
                                                        codes ? scales_name : name, "None", "pass both, or neither"));
    check_codes(*codes, name, fp8_dtype);
    check_numel(*codes, name, count);
    check_scales<Scale>(*scales, scales_name, lines, blocks);
    return {codes->as<std::uint8_t>(), scales->as<Scale>(), scales->cols()};
}

inline void check_any_copy(const OptionalView& dst, const OptionalView& dst_columns) {
    if (dst || dst_columns) return;
    throw ArgumentError(expected("a tensor", "dst or dst_columns", "None for both", "pass at least one of them"));
}

/// Calls body(first row, first column, rows, columns) for bands of at most `height` rows and kCols columns.
template <std::int64_t kCols = kBandCols, class Body>
void each_band(std::int64_t height, std::int64_t rows, std::int64_t cols, int threads, const Body& body) {
    const std::int64_t across = (cols + kCols - 1) / kCols;
    const std::int64_t tasks = across * ((rows + height - 1) / height);
    parallel_for(static_cast<std::size_t>(tasks), threads, [&](std::size_t task) {
        const std::int64_t row = static_cast<std::int64_t>(task) / across * height;
        const std::int64_t col = static_cast<std::int64_t>(task) % across * kCols;
        body(row, col, static_cast<int>(std::min(height, rows - row)), static_cast<int>(std::min(kCols, cols - col)));
    });
}

}  // namespace fusible::cast
