// A tensor in host memory as native code sees it: where it lies, what it holds, its shape. Owns nothing.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "fusible/dtype.hpp"
#include "fusible/errors.hpp"

namespace fusible {

constexpr int kMaxDims = 12;

/// a * b of two sizes. Raises where that is no 64-bit number: sizes of tensors without elements multiply to anything.
inline std::int64_t product(std::int64_t a, std::int64_t b, const char* name) {
    if (b != 0 && a > std::numeric_limits<std::int64_t>::max() / b)
        throw ShapeError(expected("sizes whose product is below 2^63", name, std::to_string(a) + " times " + std::to_string(b), "make it smaller"));
    return a * b;
}

/// What every view has; strided_view.hpp has the one whose elements may lie apart.
struct TensorBase {
    void* data = nullptr;
    DType dtype = DType::Byte;
    int ndim = 0;
    std::int64_t shape[kMaxDims] = {};

    std::int64_t numel() const {
        std::int64_t count = 1;
        for (int i = 0; i < ndim; ++i) count *= shape[i];
        return count;
    }

    /// Width of the last dimension; 1 for a scalar.
    std::int64_t cols() const { return ndim == 0 ? 1 : shape[ndim - 1]; }

    /// Product of the leading dimensions, so that a tensor reads as a matrix [rows, cols].
    std::int64_t rows() const {
        std::int64_t count = 1;
        for (int i = 0; i + 1 < ndim; ++i) count *= shape[i];
        return count;
    }

    template <class T>
    T* as() const {
        return static_cast<T*>(data);
    }

    std::string shape_text() const {
        std::string text = "[";
        for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
        return text + "]";
    }
};

/// A contiguous tensor.
struct TensorView : TensorBase {};

using OptionalView = std::optional<TensorView>;

/// A float that Python may give as a number or as a float32 tensor with one element.
struct Scalar {
    float value = 0.0f;
};

inline void check_numel(const TensorBase& tensor, const char* name, std::int64_t count) {
    if (tensor.numel() == count) return;
    throw ShapeError(expected(std::to_string(count) + " elements", name,
                              std::to_string(tensor.numel()) + " (shape " + tensor.shape_text() + ")",
                              "allocate it for the shape of the source"));
}

/// Raises where what is written lies where what is read does, of a kernel that reads it more than once.
inline void check_elsewhere(const TensorBase& written, const char* name, const TensorBase& read, const char* other) {
    if (written.data == read.data && written.numel() != 0 && read.numel() != 0)
        throw ArgumentError(expected("memory of its own", name, std::string("that of ") + other, "pass a tensor that shares none"));
}

inline void check_dtype(const TensorBase& tensor, const char* name, bool accepted, const char* what) {
    if (accepted) return;
    throw DTypeError(expected(what, name, name_of(tensor.dtype), "convert it first"));
}

}  // namespace fusible
