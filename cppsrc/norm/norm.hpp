// LayerNorm and RMSNorm on tensors: checked, split over threads, and served by the kernels of the level in force.
#pragma once

#include "cast/cast.hpp"

namespace fusible::norm {

/// LayerNorm where `mu` is given, RMSNorm where it is not; see the stub for every argument.
void norm_fwd(const TensorView& x, const TensorView& weight, const OptionalView& bias, const OptionalView& mu, const TensorView& rsigma,
              Scalar eps, bool zero_centered_gamma, const OptionalView& dst, DType dtype, const OptionalView& dst_transposed, Scalar scale,
              const OptionalView& amax, bool accumulate_amax, int num_threads);

/// The gradients of `norm_fwd`; `dbeta` goes with `mu`.
void norm_bwd(const TensorView& dz, const TensorView& x, const OptionalView& mu, const TensorView& rsigma, const TensorView& weight,
              bool zero_centered_gamma, const TensorView& dx, const TensorView& dgamma, const OptionalView& dbeta, const OptionalView& add,
              int num_threads);

}  // namespace fusible::norm
