// Indices that come as data: checked against what they point into before anything is read or written there.
#pragma once

#include <cstdint>
#include <string>

#include "fusible/tensor_view.hpp"

namespace fusible {

/// The elements of an int32 tensor that has at least `at_least` of them.
inline const std::int32_t* read_indices(const TensorView& view, const char* name, std::int64_t at_least) {
    check_dtype(view, name, view.dtype == DType::Int32, "int32");
    if (view.numel() < at_least)
        throw ShapeError(expected("at least " + std::to_string(at_least) + " elements", name, std::to_string(view.numel()), "pass one a sequence"));
    return view.as<const std::int32_t>();
}

/// The length of sequence i by cumulative lengths; the difference of two int32 need not be one.
inline std::int64_t length_of(const std::int32_t* cumulative, std::int64_t i) { return std::int64_t{cumulative[i + 1]} - cumulative[i]; }

/// Raises unless 0 <= cumulative[0] <= ... <= cumulative[sequences].
inline void check_cumulative(const std::int32_t* cumulative, std::int64_t sequences, const char* name) {
    if (cumulative[0] < 0)
        throw ArgumentError(expected("cumulative lengths from 0 on", name, std::to_string(cumulative[0]) + " first", "count the tokens before each sequence"));
    for (std::int64_t i = 0; i < sequences; ++i)
        if (length_of(cumulative, i) < 0)
            throw ArgumentError(expected("cumulative lengths that never decrease", name,
                                         std::to_string(cumulative[i + 1]) + " after " + std::to_string(cumulative[i]), "check the lengths"));
}

/// Raises unless 0 <= index < count.
inline void check_index(std::int64_t index, std::int64_t count, const char* what, const char* name) {
    if (index < 0 || index >= count)
        throw ArgumentError(expected(std::string(what) + " below " + std::to_string(count), name, std::to_string(index), "check the table"));
}

}  // namespace fusible
