// The matrix product on tensors: checked, blocked for the caches, split over threads.
#pragma once

#include "cast/cast.hpp"

namespace fusible::gemm {

/// dst = g(alpha scale_left scale_right op(left) @ op(right) + beta addend + bias); see the stub for every argument.
void gemm(const TensorView& left, bool left_transposed, DType left_dtype, Scalar left_scale, const TensorView& right, bool right_transposed,
          DType right_dtype, Scalar right_scale, const OptionalView& dst, DType dtype, const OptionalView& dst_transposed, Scalar scale,
          const OptionalView& amax, bool accumulate_amax, const OptionalView& bias, const OptionalView& addend, float alpha, float beta, int gelu,
          const OptionalView& pre_gelu, const OptionalView& column_sums, const OptionalView& right_scales, bool right_tiled,
          const OptionalView& left_scales, int num_threads);

}  // namespace fusible::gemm
