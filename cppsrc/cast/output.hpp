// What a producer of a matrix writes into: wide floats, or FP8 codes with their transposed copy. Plain data.
#pragma once

#include <cstdint>

namespace fusible {

/// Kinds of elements: the first three as the index of a source type (float32, float16, bfloat16), then E4M3 and E5M2.
constexpr int kWideKinds = 3;
constexpr int kCodesE4M3 = 3;
constexpr int kCodesE5M2 = 4;

/// A matrix [rows, cols]. `data` may be null where only the transposed codes [cols, rows] are wanted.
struct Output {
    int kind;
    void* data;
    std::uint8_t* transposed;
    std::int64_t rows;
    std::int64_t cols;
    float scale;  // of codes
};

}  // namespace fusible
