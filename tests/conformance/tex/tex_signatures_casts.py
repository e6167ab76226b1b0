"""The signatures of sharded casts, swizzles, transposes, layouts and the optimizer's variants."""

from __future__ import annotations

ADAM = "chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay"
WEIGHTS = "h_list, w_list, start_offset_list, block_len=16"
FUSED = "tile_rows, tile_cols, rows_padded, block_len"
USAGES = "tensors, rowwise_usage, columnwise_usage"

CASTS = {
    "fp8_block_scaling_compute_partial_amax": "tensor, amax, h, w, start_offset, block_len",
    "fp8_block_scaling_partial_cast": "inp, out, scale, h, w, start_offset, block_len, out_dtype",
    "mxfp8_scaling_compute_partial_amax": "input, amax_rowwise, amax_colwise, rows, cols, start_offset",
    "mxfp8_scaling_partial_cast": "input, output_rowwise, output_colwise, scale_inv_rowwise, scale_inv_colwise, rows, cols, start_offset",
    "nvfp4_2d_compute_partial_amax": "tensor, amax, h, w, start_offset, block_len=16",
    "nvfp4_2d_partial_cast": "inp, out, scale, global_scale, h, w, start_offset, block_len=16",
    "nvfp4_multi_tensor_compute_partial_amax": f"master_weight_list, partial_amax_list, global_amax_list, {WEIGHTS}",
    "nvfp4_multi_tensor_2d_partial_cast": f"inp_list, out_list, scale_list, global_scale_list, {WEIGHTS}",
    "nvfp4_expand_scale_to_fp8": f"input, output, {FUSED}",
    "nvfp4_compute_per_block_scale": "block_amax, scale, global_amax",
    "nvfp4_compute_global_scale": "global_amax, global_scale",
    "nvfp4_fused_scale": f"block_amax, global_amax, per_block_scale, target_scale, target_amax, {FUSED}",
    "nvfp4_multi_tensor_fused_scale": "block_amax_list, global_amax_list, per_block_scale_list, target_scale_list, target_amax_list, "
    "tile_rows_list, tile_cols_list, rows_padded_list, block_len",
    "nvfp4_data_transpose": "input, *, out",
    "nvfp4_2d_scale_transpose": "input, output, M_tiles, K_tiles",
    "nvfp4_2d_multi_tensor_transpose": "rowwise_data_list, columnwise_data_list, rowwise_scale_inv_list, columnwise_scale_inv_list, M_list, K_list",
    "swap_first_dims": "tensor, *, out",
    "fused_multi_row_padding": "input, output, input_row_list, padded_input_row_list",
    "fused_multi_row_unpadding": "input, output, input_row_list, unpadded_input_row_list",
    "bulk_allocate": "shapes, dtypes, device=None, alignments=None",
    "copy_data_ptrs_to_device": "tensors, device",
    "splits_to_offsets": "first_dims, logical_last_dim",
    "splits_to_offsets_multi": "split_sizes, device, *, strides, include_leading_zero, dtypes, bulk_allocate=False",
    "multi_tensor_transpose_to_bhsd": "inputs, original_format, outputs=[]",
    "multi_tensor_pad_last_dim": "inputs, alignment",
    "swizzle_scales_for_gemm_": "tensor",
    "multi_tensor_swizzle_scales_for_gemm_": USAGES,
    "multi_tensor_swizzle_scales_for_gemm_unchecked_": USAGES,
    "grouped_swizzle_for_gemm": "tensor, rowwise, columnwise",
    "swizzle_scales_and_pack_ptrs_for_discrete_weights": "data_tensors, scale_tensors, swizzle_type, device",
    "multi_tensor_scale_tensor": "chunk_size, is_infinite, tensor_lists, scale",
    "multi_tensor_unscale_l2norm": "chunk_size, noop_flag, tensor_lists, inv_scale, per_tensor_python",
    "multi_tensor_adam_param_remainder": ADAM,
    "multi_tensor_adam_fp8": f"{ADAM}, fp8_dtype",
    "multi_tensor_adam_scaled": ADAM,
    "multi_tensor_adam_capturable": f"{ADAM}, inv_scale",
    "multi_tensor_adam_capturable_master": f"{ADAM}, inv_scale",
    "multi_tensor_sgd": "chunk_size, noop_flag, tensor_lists, wd, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale",
    "multi_tensor_compute_scale_and_scale_inv": "chunk_size, noop_flag, tensor_lists, max_fp8, force_pow_2_scales, epsilon",
    "multi_tensor_compute_scale_inv_e8m0": "chunk_size, dummy, tensor_lists",
}
