// Element types, numbered as the tex interface numbers them, so that an enum crosses the boundary as its value.
#pragma once

#include <cstddef>

namespace fusible {

enum class DType : int {
    Byte = 0,
    Int16 = 1,
    Int32 = 2,
    Int64 = 3,
    Float32 = 4,
    Float16 = 5,
    BFloat16 = 6,
    Float8E4M3 = 7,
    Float8E5M2 = 8,
    Float8E8M0 = 9,
    Float4E2M1 = 10,  // two to a byte
};

inline bool is_known(int value) { return value >= 0 && value <= 10; }

/// Bytes of one element, or of two of four bits.
inline std::size_t size_of(DType dtype) {
    constexpr std::size_t sizes[] = {1, 2, 4, 8, 4, 2, 2, 1, 1, 1, 1};
    return sizes[static_cast<int>(dtype)];
}

/// The name used in messages, which `fusible.cpp_extensions` accepts as well.
inline const char* name_of(DType dtype) {
    constexpr const char* names[] = {"uint8",    "int16",         "int32",       "int64",          "float32", "float16",
                                     "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"};
    return names[static_cast<int>(dtype)];
}

inline bool is_float8(DType dtype) { return dtype == DType::Float8E4M3 || dtype == DType::Float8E5M2; }

/// float32, float16 and bfloat16: what the casts read and write beside FP8.
inline bool is_wide_float(DType dtype) {
    return dtype == DType::Float32 || dtype == DType::Float16 || dtype == DType::BFloat16;
}

}  // namespace fusible
