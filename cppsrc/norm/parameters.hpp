// The parameters of a norm as its kernels read them.
#pragma once

#include <vector>

#include "norm/kernels.hpp"
#include "runtime/checks.hpp"

namespace fusible::norm {

/// Index of a norm: the one that centres has a mean.
inline int norm_index(bool centered) { return centered ? 0 : 1; }

inline void check_parameter(const TensorView& parameter, const char* name, std::int64_t cols) {
    wide_kind(parameter, name);
    check_numel(parameter, name, cols);
}

/// `parameter` in float32, `plus` added.
inline std::vector<float> widened(const TensorView& parameter, float plus) {
    std::vector<float> values(static_cast<std::size_t>(parameter.numel()));
    kernels().widen(wide_kind(parameter, "a parameter"), parameter.data, 0, parameter.numel(), plus, values.data());
    return values;
}

}  // namespace fusible::norm
