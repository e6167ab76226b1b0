// A tensor in host memory whose elements may lie apart, such as q cut out of a packed qkv tensor. Owns nothing.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "fusible/tensor_view.hpp"

namespace fusible {

/// Not a TensorView: what takes one of those reads its elements as neighbours.
struct StridedView : TensorBase {
    std::int64_t strides[kMaxDims] = {};  // in elements

    /// Whether the elements of a row (the last dimension) are neighbours. Of no rows they are, whatever their stride.
    bool rows_are_contiguous() const { return ndim == 0 || shape[ndim - 1] <= 1 || strides[ndim - 1] == 1 || numel() == 0; }

    bool is_contiguous() const {
        std::int64_t stride = 1;
        bool follows = true;
        for (int i = ndim - 1; i >= 0; --i) {
            if (shape[i] == 0) return true;
            follows = follows && (shape[i] == 1 || strides[i] == stride);
            stride *= shape[i];
        }
        return follows;
    }

    /// Elements from the first to the last one in memory.
    std::int64_t extent() const {
        std::int64_t last = 0;
        for (int i = 0; i < ndim; ++i) {
            if (shape[i] == 0) return 0;
            last += (shape[i] - 1) * strides[i];
        }
        return last + 1;
    }
};

inline void check_rows_contiguous(const StridedView& tensor, const char* name) {
    if (tensor.rows_are_contiguous()) return;
    const std::string stride = std::to_string(tensor.strides[tensor.ndim - 1]);
    throw ArgumentError(expected("neighbouring elements in the last dimension", name, "a stride of " + stride, "call .contiguous() on it"));
}

/// Raises where two elements of a tensor that is written to could share memory, as those of an expanded one do.
inline void check_apart(const StridedView& tensor, const char* name) {
    std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride and size, the least stride first
    for (int i = 0; i < tensor.ndim; ++i) {
        if (tensor.shape[i] == 0) return;
        if (tensor.shape[i] > 1) dims.emplace_back(tensor.strides[i], tensor.shape[i]);
    }
    std::sort(dims.begin(), dims.end());
    std::int64_t reach = 0;  // from the first element to the last one, of the dimensions so far
    for (const auto& [stride, size] : dims) {
        if (stride <= reach)
            throw ArgumentError(expected("elements that share no memory", name,
                                         "a stride of " + std::to_string(stride) + " over " + std::to_string(reach + 1) + " elements",
                                         "call .contiguous() on it"));
        reach += stride * (size - 1);
    }
}

}  // namespace fusible
