"""The signatures of the functions of experts and of grouped tensors, and that the reference serves every one of them."""

from __future__ import annotations

import inspect

import pytest

from fusible import tex
from fusible.tex.interface.activation import Activation
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.interface.grouped import Grouped
from fusible.tex.interface.moe import MoE

CLAMP = "limit=7.0, alpha=1.702, glu_linear_offset=1.0"
DIMS = "num_tensors, first_dims, last_dims=None"
ROUTER = "use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias"
LOSS = "num_experts, num_rows, num_cols, topk, coeff"
GROUPED_GEMM = "A, transa, B, transb, D, bias, bias_scale, alpha, beta, workspace_setup, workspace_cublas, use_split_accumulator, math_sm_count"
SIGNATURES = {
    "moe_permute_fwd": "input, dtype, indices, num_out_tokens, workspace, max_expanded_token_num",
    "moe_permute_bwd": "input, dtype, row_id_map, prob, num_tokens, topK",
    "moe_unpermute_fwd": "input, dtype, row_id_map, prob, num_tokens, topK",
    "moe_unpermute_bwd": "input_bwd, input_fwd, dtype, row_id_map, prob",
    "fused_topk_with_score_function_fwd": f"logits, topk, {ROUTER}, routing_map_format=0, topk_indices=None",
    "fused_topk_with_score_function_qb_fwd": "logits, topk, scaling_factor, expert_bias, routing_map_format, topk_indices, histogram, bin_bounds, "
    "histogram_mode, bin_bounds_validated=False",
    "fused_topk_with_score_function_bwd": "routing_map, intermediate_output, grad_probs, grad_logits, topk, use_pre_softmax, scaling_factor, "
    "score_function, use_dense_indices=False, routing_map_format=0",
    "fused_score_for_moe_aux_loss_fwd": "logits, topk, score_function, routing_map_format=0",
    "fused_score_for_moe_aux_loss_bwd": "intermediate_output, grad_scores, grad_logits, topk, score_function",
    "fused_moe_aux_loss_fwd": f"probs, tokens_per_expert, total_num_tokens, {LOSS}",
    "fused_moe_aux_loss_fwd_graph_safe": f"probs, tokens_per_expert, total_num_tokens, {LOSS}",
    "fused_moe_aux_loss_bwd": "Const_buf, tokens_per_expert, num_rows, num_cols, grad_aux_loss",
    "scaled_swiglu": "input, act_scales, quantizer, glu_interleave_size=0",
    "scaled_situglu": "input, act_scales, quantizer, beta1=4.0, beta2=25.0, glu_interleave_size=0",
    "scaled_clamped_swiglu": f"input, act_scales, quantizer, {CLAMP}, glu_interleave_size=0",
    "scaled_srelu": "input, act_scales, quantizer",
    "scaled_dswiglu": "grad, fwd_input, act_scales, quantizer, glu_interleave_size=0, compute_scale_grad=True",
    "scaled_dsituglu": "grad, fwd_input, act_scales, quantizer, beta1=4.0, beta2=25.0, glu_interleave_size=0, compute_scale_grad=True",
    "scaled_clamped_dswiglu": f"grad, fwd_input, act_scales, quantizer, {CLAMP}, glu_interleave_size=0, compute_scale_grad=True",
    "scaled_dsrelu": "grad, fwd_input, act_scales, quantizer, compute_scale_grad=True",
    "te_general_grouped_gemm": "A, transa, B, transb, D, D_type, m_splits, bias, bias_type, single_output, pre_gelu_out, grad, workspace, "
    "workspaceSize, accumulate, use_split_accumulator, math_sm_count",
    **{f"te_general_grouped_gemm_for_{form}": GROUPED_GEMM for form in ("grouped_tensor", "discrete_in", "discrete_out")},
    "get_grouped_gemm_setup_workspace_size": "num_tensors",
    "group_quantize": f"tensor, quantizer, {DIMS}, tensor_offsets=None, noop_flag=None, output=None",
    "group_dequantize": "input, otype",
    "bgrad_group_quantize": f"tensor, quantizer, {DIMS}, tensor_offsets=None",
    "group_requantize_inplace": "grouped_x, quantizer, num_tensors, first_dims, otype, tensor_offsets=None, return_dequantized=False",
    "nvfp4_group_quantize_with_amax": f"tensor, quantizer, {DIMS}, rowwise_amax=None, columnwise_amax=None, tensor_offsets=None",
    "group_scaled_swiglu": "input_2h, prob, quantizer, num_tensors, first_dims=None, last_dims=None, tensor_offsets=None",
    "group_scaled_clamped_swiglu": "input_2h, prob, quantizer, num_tensors, limit, alpha=1.702, glu_linear_offset=1.0, first_dims=None, "
    "last_dims=None, tensor_offsets=None",
}


@pytest.mark.parametrize(("function", "signature"), SIGNATURES.items(), ids=SIGNATURES.keys())
def test_the_signature_is_nvidias_and_the_reference_serves_it(function: str, signature: str) -> None:
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(getattr(tex, function)).parameters.values()]
    assert str(inspect.Signature(parameters)) == f"({signature})"
    assert getattr(tex.backends.torch_backend.TorchBackend, function) is not getattr(tex.TEXBackendBase, function)


def test_no_function_of_these_rooms_is_left_out() -> None:
    scaled = {name for name in vars(Activation) if name.startswith("scaled_")}
    assert SIGNATURES.keys() == {name for room in (MoE, Grouped) for name in vars(room) if name in DECLARATIONS} | scaled
