// The optimizer's passes over lists of tensors: checked, all tensors of a call split over threads together.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "fusible/tensor_view.hpp"

namespace fusible::optimizer {

using TensorList = std::vector<TensorView>;

/// One step of Adam in place; see the stub for every argument.
void multi_tensor_adam(const TensorList& gradients, const TensorList& weights, const TensorList& first, const TensorList& second,
                       const TensorList& masters, double lr, double beta1, double beta2, double epsilon, double correction1, double correction2,
                       bool decoupled, double weight_decay, int num_threads);

/// The same of moments and masters that are held in few bits, each tensor with a scale; see the stub for every argument.
void multi_tensor_adam_scaled(const TensorList& gradients, const TensorList& weights, const TensorList& first, const TensorList& second,
                              const TensorList& first_scales, const TensorList& second_scales, const TensorList& masters,
                              const TensorList& master_scales, double lr, double beta1, double beta2, double epsilon, double correction1,
                              double correction2, bool decoupled, double weight_decay, int num_threads);

/// The L2 norm over all tensors, and that of each.
std::pair<double, std::vector<double>> multi_tensor_l2norm(const TensorList& tensors, int num_threads);

/// One step of stochastic gradient descent in place; see the stub for every argument.
void multi_tensor_sgd(const TensorList& gradients, const TensorList& weights, const TensorList& momenta, const TensorList& copies, double lr,
                      double momentum, double dampening, double weight_decay, double scale, bool nesterov, bool first_run, bool decay_after,
                      int num_threads);

/// outputs = inputs * scale; whether every input is finite.
bool multi_tensor_scale(const TensorList& inputs, const TensorList& outputs, double scale, const std::optional<TensorView>& flag, int num_threads);

}  // namespace fusible::optimizer
