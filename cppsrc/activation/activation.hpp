// The activations on tensors: checked, split over threads, and served by the kernels of the level in force. See the stub for every argument.
#pragma once

#include <string>

#include "cast/cast.hpp"

namespace fusible::activation {

/// dst = f(src).
void activation(const std::string& name, const TensorView& src, const OptionalView& dst, DType dtype, const OptionalView& dst_transposed,
                Scalar scale, const OptionalView& amax, bool accumulate_amax, int num_threads);

/// dst = grad f'(src); bias_grad = the sum of that over its rows.
void activation_backward(const std::string& name, const TensorView& grad, const TensorView& src, const OptionalView& dst, DType dtype,
                         const OptionalView& dst_transposed, Scalar scale, const OptionalView& amax, bool accumulate_amax,
                         const OptionalView& bias_grad, int num_threads);

/// dst [rows, H] = f(a, b) of src [rows, 2H] = [a, b].
void gated_activation(const std::string& name, const TensorView& src, const OptionalView& dst, DType dtype, const OptionalView& dst_transposed,
                      Scalar scale, const OptionalView& amax, bool accumulate_amax, float beta1, float beta2, float limit, float alpha,
                      float offset, int num_threads);

/// dst [rows, 2H] = [grad df/da, grad df/db].
void gated_activation_backward(const std::string& name, const TensorView& grad, const TensorView& src, const OptionalView& dst, DType dtype,
                               const OptionalView& dst_transposed, Scalar scale, const OptionalView& amax, bool accumulate_amax, float beta1,
                               float beta2, float limit, float alpha, float offset, int num_threads);

}  // namespace fusible::activation
