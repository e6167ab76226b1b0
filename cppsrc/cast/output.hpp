// What a producer of a matrix writes into: wide floats, or FP8 codes with their transposed copy. Plain data.
#pragma once

#include <cstdint>

#include "runtime/element_kind.hpp"

namespace fusible::cast {

/// A matrix [rows, cols]. `data` may be null where only the transposed codes [cols, rows] are wanted.
struct Output {
    ElementKind kind;
    void* data;
    std::uint8_t* transposed;
    std::int64_t rows;
    std::int64_t cols;
    float scale;  // of codes
};

}  // namespace fusible::cast
