"""Every record of the table on every backend that is here."""

from __future__ import annotations

from typing import Any

import pytest
import tex_table_gemm  # noqa: F401
import tex_table_misc  # noqa: F401
import tex_table_norm  # noqa: F401
import tex_table_pointwise  # noqa: F401
import tex_table_rope  # noqa: F401
import tex_table_scaled  # noqa: F401
import tex_table_softmax  # noqa: F401
import torch
from tex_backends import REFERENCE, Runner, runners
from tex_op_table import TABLE, Record, check, close
from tex_signatures_casts import CASTS

from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer
from fusible.tex import DType
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.protocol import FP8_MAX


def cases(*, quantizing: bool) -> list[Any]:
    """Every record, dtype and backend that implements the function."""
    return [
        pytest.param(runner, entry, dtype, id=f"{entry.function}-{str(dtype)[6:]}-{runner.backend}")
        for entry in TABLE.values()
        if entry.quantizes or not quantizing
        for dtype in entry.dtypes
        for runner in runners(entry.function)
    ]


@pytest.mark.parametrize(("runner", "entry", "dtype"), cases(quantizing=False))
def test_matches_the_float64_reference(runner: Runner, entry: Record, dtype: torch.dtype) -> None:
    for sample in entry.samples(dtype):
        result = runner(entry.function, **sample.arguments)
        for output in sample.outputs:
            try:
                check(output, result if output.at is None else result[output.at])
            except AssertionError as error:
                raise AssertionError(f"{entry.function} {sample.label}, output {output.at}: {error}") from None


@pytest.mark.parametrize("fp8", [DType.kFloat8E4M3, DType.kFloat8E5M2])
@pytest.mark.parametrize(("runner", "entry", "dtype"), cases(quantizing=True))
def test_quantized_outputs_are_within_half_a_step_of_the_reference(runner: Runner, entry: Record, dtype: torch.dtype, fp8: DType) -> None:
    for sample in entry.samples(dtype):
        main = sample.outputs[0]
        assert main.reference is not None
        scale = torch.tensor([16.0])
        quantizers = (Float8Quantizer(scale, torch.zeros(1), fp8), Float8CurrentScalingQuantizer(fp8, "cpu"))
        for quantizer in quantizers:
            result = runner(entry.function, **{**sample.arguments, "quantizer": quantizer})
            quantized = result if main.at is None else result[main.at]
            assert quantized._dtype is main.dtype
            value = REFERENCE("dequantize", input=quantized, otype=DType.kFloat32)
            if not value.numel():
                continue
            largest = main.reference.abs().max()
            step = {DType.kFloat8E4M3: 2.0**-4, DType.kFloat8E5M2: 2.0**-3}[fp8]
            smallest = {DType.kFloat8E4M3: 2.0**-10, DType.kFloat8E5M2: 2.0**-17}[fp8] * quantized._scale_inv.item()
            slack = torch.finfo(main.dtype).eps + 2 * (main.length + 16) * torch.finfo(torch.float32).eps * max(1.0, main.magnitude or 1.0)
            saturated = FP8_MAX[fp8] * quantized._scale_inv.item()
            expected = main.reference.clamp(-saturated, saturated)
            error = (value.double() - expected).abs()
            assert (error <= (step + slack) * expected.abs() + smallest + slack).all(), (entry.function, sample.label)
            if quantizer is quantizers[0]:
                close(quantizer.amax, largest[None], torch.float32, main.length, max(1.0, main.magnitude or largest.item()))
            transposed = quantized._data.movedim(-1, 0)
            assert torch.equal(quantized._transpose, transposed)


def test_the_table_covers_every_function_with_a_numeric_result() -> None:
    elsewhere = {
        " ".join(CASTS): "test_tex_sharded_cast, test_tex_swizzle, test_tex_layout, test_tex_optimizer_variants",
        "quantize dequantize bgrad_quantize create_empty_quantized_tensor fp8_transpose compute_amax": "test_tex_quantize",
        "multi_tensor_quantize split_quantize nvfp4_quantize_with_amax": "test_tex_block_usage",
        "fused_amax_and_scale_update_after_reduction": "test_tex_recipe",
        "multi_tensor_adam multi_tensor_l2norm multi_tensor_scale": "test_tex_optimizer",
        "moe_permute_fwd moe_permute_bwd moe_unpermute_fwd moe_unpermute_bwd": "test_tex_permutation",
        "fused_topk_with_score_function_fwd fused_topk_with_score_function_qb_fwd fused_topk_with_score_function_bwd": "test_tex_router",
        "fused_score_for_moe_aux_loss_fwd fused_score_for_moe_aux_loss_bwd": "test_tex_router",
        "fused_moe_aux_loss_fwd fused_moe_aux_loss_fwd_graph_safe fused_moe_aux_loss_bwd": "test_tex_router_loss",
        "te_general_grouped_gemm te_general_grouped_gemm_for_grouped_tensor get_grouped_gemm_setup_workspace_size": "test_tex_grouped_gemm",
        "te_general_grouped_gemm_for_discrete_in te_general_grouped_gemm_for_discrete_out": "test_tex_grouped_gemm",
        "group_quantize group_dequantize bgrad_group_quantize group_requantize_inplace": "test_tex_grouped_quantize",
        "nvfp4_group_quantize_with_amax group_scaled_swiglu group_scaled_clamped_swiglu": "test_tex_grouped_quantize",
        "fused_attn_fwd fused_attn_bwd get_fused_attn_backend": "test_tex_attention",
        "copy_to_kv_cache": "test_tex_kv_cache",
        "convert_thd_to_bshd convert_bshd_to_thd fa_prepare_fwd fa_prepare_bwd": "test_tex_token_layouts",
        "thd_read_half_tensor thd_second_half_lse_correction thd_read_second_half_lse thd_out_correction": "test_tex_context_parallel",
        "thd_get_partitioned_indices thd_sequence_order_to_cp_rank_order thd_cp_rank_order_to_sequence_order": "test_tex_context_parallel",
        "thd_grad_correction thd_copy_valid_tokens_from_per_split_to_rank_local": "test_tex_context_parallel",
        "dropout_fwd dropout_bwd prim_dropout prim_dropout_backward": "test_tex_dropout",
        "prim_copy prim_reshape prim_empty prim_full prim_concatenate prim_split": "test_tex_prim",
    }
    assert set(DECLARATIONS) - set(TABLE) <= {name for names in elsewhere for name in names.split()}
