// A tensor in host memory whose elements may lie apart, such as q cut out of a packed qkv tensor. Owns nothing.
#pragma once

#include "fusible/tensor_view.hpp"

namespace fusible {

/// Not a TensorView: what takes one of those reads its elements as neighbours.
struct StridedView : TensorBase {
    std::int64_t strides[kMaxDims] = {};  // in elements

    /// Whether the elements of a row (the last dimension) are neighbours.
    bool rows_are_contiguous() const { return ndim == 0 || shape[ndim - 1] <= 1 || strides[ndim - 1] == 1; }
};

inline void check_rows_contiguous(const StridedView& tensor, const char* name) {
    if (tensor.rows_are_contiguous()) return;
    const std::string stride = std::to_string(tensor.strides[tensor.ndim - 1]);
    throw ArgumentError(expected("neighbouring elements in the last dimension", name, "a stride of " + stride, "call .contiguous() on it"));
}

}  // namespace fusible
