// The casts on tensors: checked, split over threads, and served by the kernels of the level in force.
#pragma once

#include "fusible/tensor_view.hpp"

namespace fusible::cast {

/// q = fp8(src * scale), rounded to nearest even and saturated; see the stub for every argument.
void quantize(const TensorView& src, const OptionalView& dst, Scalar scale, DType fp8_dtype, const OptionalView& dst_transposed,
              const OptionalView& amax, bool accumulate_amax, const OptionalView& bias_grad, const OptionalView& noop, int num_threads);

/// max |src| in float32: NaN if there is a NaN, else +inf if there is an infinity; 0 when empty. Also written to `out`.
float amax(const TensorView& src, const OptionalView& out, int num_threads);

/// dst = value(src) * scale_inv.
void dequantize(const TensorView& src, const TensorView& dst, Scalar scale_inv, DType fp8_dtype, int num_threads);

/// MXFP8: codes and exponents of blocks along rows, along columns, or both.
void quantize_mxfp8(const TensorView& src, DType fp8_dtype, const OptionalView& dst, const OptionalView& exponents, const OptionalView& dst_columns,
                    const OptionalView& exponents_columns, bool tiled, int num_threads);

/// dst = value(src) * 2^(exponent - 127); whether products of such values in bf16 are what they are in float.
bool dequantize_mxfp8(const TensorView& src, const TensorView& exponents, bool along_rows, const TensorView& dst, DType fp8_dtype, int num_threads);

/// NVFP4: E2M1 codes and E4M3 scales of blocks of 16 along the rows, or along the columns.
void quantize_nvfp4(const TensorView& src, Scalar amax, const TensorView& dst, const TensorView& scales, bool columns, bool tiled,
                    const OptionalView& seed, int num_threads);

/// dst = src with its columns transformed in blocks of 16, rounded to bfloat16 before and after; max |dst|, and max |src| in `source_amax`.
float transform_columns(const TensorView& src, const TensorView& transform, const TensorView& dst, const OptionalView& out,
                        const OptionalView& source_amax, int num_threads);

/// dst = value(code) * value(scale).
void dequantize_nvfp4(const TensorView& src, const TensorView& scales, const TensorView& dst, int num_threads);

/// FP8 with fp32 scales of 1 x 128 blocks or of squares: codes and inverse scales of each row, codes of each column as a row, or both.
void quantize_block_fp8(const TensorView& src, DType fp8_dtype, const OptionalView& dst, const OptionalView& scales, const OptionalView& dst_columns,
                        const OptionalView& scales_columns, bool tiled, float epsilon, bool power_of_two, int num_threads);

/// dst = value(src) * scale; whether bf16 holds all of them, and products of two in it are what they are in float.
bool dequantize_block_fp8(const TensorView& src, const TensorView& scales, bool tiled, const TensorView& dst, DType fp8_dtype, int num_threads);

/// dst[c] = the sum of src[r, c] over its rows, in float, in an order that does not depend on the threads.
void column_sums(const TensorView& src, const TensorView& dst, int num_threads);

/// dst[c, r] = src[r, c], for one-byte elements; src is read as [rows, cols] with its last dimension as cols.
void transpose_bytes(const TensorView& src, const TensorView& dst, int num_threads);

}  // namespace fusible::cast
