// An operand of a product: a matrix of wide floats or of FP8 codes with their scale.
#pragma once

#include <string>

#include "cast/output.hpp"
#include "runtime/checks.hpp"

namespace fusible::gemm {

struct Operand {
    const std::uint8_t* data;
    std::int64_t rows;  // as it is stored
    std::int64_t cols;
    ElementKind kind;
    std::int64_t width;  // bytes of an element
    bool transposed;
    float scale;

    const void* at(std::int64_t row, std::int64_t col) const { return data + (row * cols + col) * width; }
};

inline Operand read_operand(const TensorView& view, bool transposed, DType dtype, Scalar scale, const char* name) {
    if (view.ndim < 1)
        throw ShapeError(expected("at least one dimension", name, "a scalar", "pass a matrix"));
    ElementKind kind;
    if (is_float8(dtype)) {
        check_codes(view, name, dtype);
        kind = code_kind(dtype);
    } else {
        check_dtype(view, name, view.dtype == dtype, name_of(dtype));
        kind = wide_kind(view, name);
    }
    return {view.as<const std::uint8_t>(), view.rows(), view.cols(), kind, static_cast<std::int64_t>(size_of(view.dtype)), transposed, scale.value};
}

}  // namespace fusible::gemm
