"""Why the xla backend leaves a function to others, in the words of what it is for."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["REASONS"]

_REASONS: dict[str, Sequence[str]] = {
    "serves calls on tensors that record, and this one takes none": (
        "bulk_allocate",
        "create_empty_quantized_tensor",
        "device_supports_multicast",
        "get_cublasLt_version",
        "get_cudnn_version",
        "get_fused_attn_backend",
        "get_grouped_gemm_setup_workspace_size",
        "get_num_cublas_streams",
        "get_stream_priority_range",
        "nvte_built_with_cublasmp",
        "ubuf_built_with_mpi",
    ),
    "compiles programs of one process, and it takes those of a group": ("prim_all_gather", "prim_all_reduce", "prim_reduce_scatter"),
    "compiles programs of one process, and this is a step of casting weights that are sharded over several": (
        "fp8_block_scaling_compute_partial_amax",
        "fp8_block_scaling_partial_cast",
        "mxfp8_scaling_compute_partial_amax",
        "mxfp8_scaling_partial_cast",
        "nvfp4_2d_compute_partial_amax",
        "nvfp4_2d_partial_cast",
        "nvfp4_compute_global_scale",
        "nvfp4_compute_per_block_scale",
        "nvfp4_expand_scale_to_fp8",
        "nvfp4_fused_scale",
        "nvfp4_multi_tensor_2d_partial_cast",
        "nvfp4_multi_tensor_compute_partial_amax",
        "nvfp4_multi_tensor_fused_scale",
    ),
    "compiles programs of one process, and this is a step of attention over the parts that several have of a sequence": (
        "thd_copy_valid_tokens_from_per_split_to_rank_local",
        "thd_cp_rank_order_to_sequence_order",
        "thd_get_partitioned_indices",
        "thd_grad_correction",
        "thd_out_correction",
        "thd_read_half_tensor",
        "thd_read_second_half_lse",
        "thd_second_half_lse_correction",
        "thd_sequence_order_to_cp_rank_order",
    ),
    "records values, which have no place in memory, and this reads or gives one": (
        "copy_data_ptrs_to_device",
        "fa_prepare_fwd",
        "swizzle_scales_and_pack_ptrs_for_discrete_weights",
    ),
    "multiplies by scales in the order in which it makes them, and leaves that of tensor cores to calls on real tensors": (
        "grouped_swizzle_for_gemm",
        "multi_tensor_swizzle_scales_for_gemm_",
        "multi_tensor_swizzle_scales_for_gemm_unchecked_",
        "swizzle_scales_for_gemm_",
    ),
    "serves what operations and optimizers of Fusible record, and none of them routes tokens to experts": (
        "fused_moe_aux_loss_bwd",
        "fused_moe_aux_loss_fwd",
        "fused_moe_aux_loss_fwd_graph_safe",
        "fused_score_for_moe_aux_loss_bwd",
        "fused_score_for_moe_aux_loss_fwd",
        "fused_topk_with_score_function_bwd",
        "fused_topk_with_score_function_fwd",
        "fused_topk_with_score_function_qb_fwd",
        "moe_permute_bwd",
        "moe_permute_fwd",
        "moe_unpermute_bwd",
        "moe_unpermute_fwd",
    ),
    "serves what operations and optimizers of Fusible record, and none of them calls this": (
        "fa_prepare_bwd",
        "fused_multi_row_padding",
        "fused_multi_row_unpadding",
        "fused_qkv_rope_backward",
        "fused_qkv_rope_forward",
        "group_requantize_inplace",
        "group_scaled_clamped_swiglu",
        "group_scaled_swiglu",
        "multi_tensor_pad_last_dim",
        "multi_tensor_transpose_to_bhsd",
        "nvfp4_group_quantize_with_amax",
    ),
}

REASONS: dict[str, str] = {function: reason for reason, functions in _REASONS.items() for function in functions}
"""Of each function that other backends of this package serve: why this one does not, as a phrase after "it"."""
