// Softmax over the last dimension and its gradient on tensors: checked, split over threads, and served by the kernels of the level in force.
#pragma once

#include <optional>

#include "fusible/tensor_view.hpp"

namespace fusible::softmax {

/// dst = softmax(scale * src), with a mask or a causal one; see the stub for every argument.
void softmax_forward(const TensorView& src, const TensorView& dst, double scale, const std::optional<TensorView>& mask, bool causal,
                     int num_threads);

/// dst = scale * results * (grads - sum(results * grads)).
void softmax_backward(const TensorView& grads, const TensorView& results, const TensorView& dst, double scale, bool causal, int num_threads);

}  // namespace fusible::softmax
