// The destination of a producer as Python gives it, checked: every function that emits has these arguments, in this order.
#pragma once

#include <optional>

#include "cast/cast.hpp"
#include "cast/maximum.hpp"
#include "cast/output.hpp"
#include "runtime/checks.hpp"

namespace fusible::cast {

/// `dst` and `dst_transposed` as an Output. Wide floats: dst alone, of `dtype`. FP8: codes of src * scale in either or both.
inline Output read_output(const OptionalView& dst, DType dtype, const OptionalView& dst_transposed, Scalar scale, std::int64_t rows,
                          std::int64_t cols) {
    if (!is_wide_float(dtype) && !is_float8(dtype))
        throw DTypeError(expected("float32, float16, bfloat16 or an FP8 format", "dtype", name_of(dtype), "choose one of these"));
    Output out{ElementKind::Float32, dst ? dst->data : nullptr, nullptr, rows, cols, scale.value};
    if (is_wide_float(dtype)) {
        if (!dst || dst_transposed)
            throw ArgumentError(expected("dst alone", "the destination", dst ? "dst_transposed as well" : "no dst", "ask for FP8 to get a transposed copy"));
        check_dtype(*dst, "dst", dst->dtype == dtype, name_of(dtype));
        out.kind = wide_kind(*dst, "dst");
    } else {
        out.kind = code_kind(dtype);
        if (!dst && !dst_transposed)
            throw ArgumentError(expected("a tensor", "dst or dst_transposed", "None for both", "pass at least one of them"));
        if (dst) check_codes(*dst, "dst", dtype);
        if (dst_transposed) check_codes(*dst_transposed, "dst_transposed", dtype);
        if (dst_transposed) check_numel(*dst_transposed, "dst_transposed", rows * cols);
        if (dst_transposed) out.transposed = dst_transposed->as<std::uint8_t>();
    }
    if (dst) check_numel(*dst, "dst", rows * cols);
    return out;
}

}  // namespace fusible::cast
