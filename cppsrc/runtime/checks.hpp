// What every family asks of its arguments, and the kinds of their elements.
#pragma once

#include "fusible/tensor_view.hpp"
#include "runtime/element_kind.hpp"

namespace fusible {

inline ElementKind wide_kind(const TensorBase& tensor, const char* name) {
    check_dtype(tensor, name, is_wide_float(tensor.dtype), "float32, float16 or bfloat16");
    return tensor.dtype == DType::Float32 ? ElementKind::Float32 : tensor.dtype == DType::Float16 ? ElementKind::Float16 : ElementKind::BFloat16;
}

inline ElementKind code_kind(DType dtype) {
    if (!is_float8(dtype))
        throw DTypeError(expected("float8_e4m3fn or float8_e5m2", "fp8_dtype", name_of(dtype), "choose one of the FP8 formats"));
    return dtype == DType::Float8E4M3 ? ElementKind::E4M3 : ElementKind::E5M2;
}

/// Codes travel as uint8, or as the float8 dtype that they are.
inline void check_codes(const TensorView& tensor, const char* name, DType fp8_dtype) {
    const bool accepted = tensor.dtype == DType::Byte || tensor.dtype == fp8_dtype;
    check_dtype(tensor, name, accepted, fp8_dtype == DType::Float8E4M3 ? "uint8 or float8_e4m3fn" : "uint8 or float8_e5m2");
}

inline void check_float32(const TensorView& tensor, const char* name, std::int64_t count) {
    check_dtype(tensor, name, tensor.dtype == DType::Float32, "float32");
    check_numel(tensor, name, count);
}

inline void check_threads(int num_threads) {
    if (num_threads < 0)
        throw ArgumentError(expected("a number >= 0", "num_threads", std::to_string(num_threads), "pass 0 for the default"));
}

}  // namespace fusible
