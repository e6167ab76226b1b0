"""What every function of the reference backend allocates at once: at most three times its arguments and results, counted in fp32.

Casts of slices of weights, movements and optimizer steps are in ``test_tex_casts_memory``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tex_backends import REFERENCE
from tex_peak_bytes import check_peak
from torch import Tensor

from fusible.conformance.cases import attention
from fusible.conformance.cases.gemm import call as gemm_call
from fusible.conformance.cases.routing import Router
from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType, NVTE_QKV_Format
from fusible.tex.enums import NVTE_QKV_Layout

Dtype = torch.dtype
Make = Callable[[Dtype], dict[str, Any]]
ROWS, WIDTH = 512, 1024
E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
FP32, BF16 = torch.float32, torch.bfloat16


def normal(*shape: int, dtype: Dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def matrix(dtype: Dtype) -> Tensor:
    return normal(ROWS, WIDTH, dtype=dtype)


def counts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


QUANTIZERS: dict[str, Callable[[], Any]] = {
    "delayed": lambda: Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), E4M3),
    "current": lambda: Float8CurrentScalingQuantizer(E5M2, "cpu"),
    "blocks-1d": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "blocks-2d": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=2),
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "mxfp8-2d": lambda: MXFP8Quantizer(E4M3, with_2d_quantization=True),
    "nvfp4": NVFP4Quantizer,
    "nvfp4-2d": lambda: NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4-rows": lambda: NVFP4Quantizer(row_scaled_nvfp4=True),
    "nvfp4-rht": lambda: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "nvfp4-stochastic": lambda: NVFP4Quantizer(stochastic_rounding=True),
    "nvfp4-4over6": lambda: NVFP4Quantizer(nvfp4_use_4over6=True),
    "blocks-1d-rows": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1, columnwise=False),
    "mxfp8-columns": lambda: MXFP8Quantizer(E4M3, rowwise=False),
    "nvfp4-only-rows": lambda: NVFP4Quantizer(columnwise=False),
    "nvfp4-only-columns": lambda: NVFP4Quantizer(rowwise=False),
    "nvfp4-4over6-only-rows": lambda: NVFP4Quantizer(nvfp4_use_4over6=True, columnwise=False),
    "nvfp4-4over6-mse": lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE"),
}

PLAIN = ("gelu", "erf_gelu", "silu", "relu", "qgelu", "srelu")
GATED = ("glu", "geglu", "erf_geglu", "qgeglu", "reglu", "sreglu", "swiglu", "situglu", "clamped_swiglu")


def backward_of(name: str) -> str:
    lead, underscore, last = name.rpartition("_")
    return f"{lead}{underscore}d{last}"


def activations() -> dict[str, Make]:
    calls: dict[str, Make] = {name: lambda t: {"input": matrix(t), "quantizer": None} for name in PLAIN + GATED}
    for name in PLAIN + GATED:
        width = WIDTH // 2 if name in GATED else WIDTH
        gradient: Make = lambda t, w=width: {"grad": normal(ROWS, w, dtype=t), "fwd_input": matrix(t), "quantizer": None}  # noqa: E731
        calls[backward_of(name)] = gradient
        if name in PLAIN:
            calls[f"dbias_{backward_of(name)}"] = gradient
    for name in ("swiglu", "situglu", "clamped_swiglu", "srelu"):
        width = WIDTH if name == "srelu" else WIDTH // 2
        scales: Callable[[Dtype], Tensor] = lambda t: normal(ROWS, dtype=t)  # noqa: E731
        calls[f"scaled_{name}"] = lambda t, s=scales: {"input": matrix(t), "act_scales": s(t), "quantizer": None}
        calls["scaled_clamped_dswiglu" if name == "clamped_swiglu" else f"scaled_d{name}"] = lambda t, w=width, s=scales: {
            "grad": normal(ROWS, w, dtype=t), "fwd_input": matrix(t), "act_scales": s(t), "quantizer": None,
        }  # fmt: skip
    return calls


NORM = {"sm_margin": 0, "zero_centered_gamma": False}


def forward_norm(t: Dtype) -> dict[str, Any]:
    return {"input": matrix(t), "weight": normal(WIDTH, dtype=t), "eps": 1e-5, "ln_out": None, "quantizer": None, "otype": t, **NORM}


def backward_norm(t: Dtype) -> dict[str, Any]:
    return {"dz": matrix(t), "x": matrix(t), "rsigma": normal(ROWS), "gamma": normal(WIDTH, dtype=t), **NORM}


NORMS: dict[str, Make] = {
    "layernorm_fwd": lambda t: {**forward_norm(t), "bias": normal(WIDTH, dtype=t)},
    "rmsnorm_fwd": forward_norm,
    "layernorm_bwd": lambda t: {**backward_norm(t), "mu": normal(ROWS)},
    "rmsnorm_bwd": backward_norm,
    "rmsnorm_bwd_add": lambda t: {**backward_norm(t), "add": matrix(t)},
    "prim_layernorm_bwd_add": lambda t: {**backward_norm(t), "add": matrix(t), "mu": normal(ROWS)},
}


def scores(t: Dtype) -> Tensor:
    return normal(2, 4, 256, 256, dtype=t)


def pair(gradient: str, shape: tuple[int, ...] = (2, 4, 256, 256)) -> Make:
    return lambda t: {gradient: normal(*shape, dtype=t), "softmax_results_": normal(*shape, dtype=t), "scale_factor": 0.5}


SOFTMAX: dict[str, Make] = {
    "scaled_softmax_forward": lambda t: {"input": scores(t), "scale_factor": 0.5},
    "scaled_masked_softmax_forward": lambda t: {
        "input": scores(t), "mask": torch.zeros(2, 1, 256, 256, dtype=torch.uint8), "scale_factor": 0.5,
    },
    "scaled_upper_triang_masked_softmax_forward": lambda t: {"input": scores(t).view(8, 256, 256), "scale_factor": 0.5},
    "scaled_aligned_causal_masked_softmax_forward": lambda t: {"input": scores(t), "scale_factor": 0.5},
    "scaled_softmax_backward": pair("output_grad_"),
    "scaled_masked_softmax_backward": pair("output_grad_"),
    "scaled_upper_triang_masked_softmax_backward": pair("output_grads_", (8, 256, 256)),
    "scaled_aligned_causal_masked_softmax_backward": pair("output_grads_"),
}  # fmt: skip

ANGLES = torch.rand(256, 1, 1, 64)
ROPE = {"qkv_format": NVTE_QKV_Format.NVTE_SBHD, "interleaved": False, "cp_size": 1, "cp_rank": 0}
TOGETHER = {"q_freqs": ANGLES, "k_freqs": ANGLES, "qkv_split_arg_list": [128, 64, 64], **ROPE}
ROTATIONS: dict[str, Make] = {
    "fused_rope_forward": lambda t: {"input": normal(256, 4, 8, 64, dtype=t), "freqs": ANGLES, "start_positions": None, "cu_seqlens": None, **ROPE},
    "fused_rope_backward": lambda t: {
        "output_grads": normal(256, 4, 8, 64, dtype=t), "freqs": ANGLES, "start_positions": None, "cu_seqlens": None, **ROPE,
    },
    "fused_qkv_rope_forward": lambda t: {"qkv_input": normal(256, 4, 2, 256, dtype=t), "start_positions": None, **TOGETHER},
    "fused_qkv_rope_backward": lambda t: {
        "q_grad_out": normal(256, 4, 4, 64, dtype=t), "k_grad_out": normal(256, 4, 2, 64, dtype=t), "v_grad_out": normal(256, 4, 2, 64, dtype=t),
        **TOGETHER,
    },
}  # fmt: skip

PROBLEMS = {
    "bshd": attention.Problem("bshd", NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, lengths=(1024, 1024)),
    "causal": attention.Problem("causal", NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD, causal=True, groups=2, lengths=(1024, 1024)),
    "thd": attention.Problem("thd", NVTE_QKV_Layout.NVTE_THD_THD_THD, causal=True, lengths=(1100, 900, 48)),
}
UNSET = NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET


def attending(problem: attention.Problem, t: Dtype) -> dict[str, Any]:
    more = {
        "is_training": True, "page_table_k": None, "page_table_v": None, "o_quantizer": None, "Bias": None, "SoftmaxOffset": None, "rng_gen": None,
        "rng_elts_per_thread": 0, "return_max_logit": False,
    }  # fmt: skip
    return {**attention.inputs_of(problem, torch.Generator().manual_seed(1), t).arguments, **more}


def attending_backward(problem: attention.Problem, t: Dtype) -> dict[str, Any]:
    forward = attending(problem, t)
    o, *aux = REFERENCE("fused_attn_fwd", **forward)
    common = attention.inputs_of(problem, torch.Generator().manual_seed(1), t).arguments
    return {
        **common, "do_format": UNSET, "dqkv_layout": problem.layout, "do_scale_inv_format": UNSET, "deterministic": True, "O": o,
        "dO": torch.randn_like(o), "Aux_CTX_Tensors": aux[:2], "dp_quantizer": None, "dqkv_quantizer": None,
    }  # fmt: skip


ENDS = counts(384, 128, 0, 512)
T = 1024


def packed(t: Dtype, tokens: int = T) -> Tensor:
    return normal(tokens, 4, 64, dtype=t)


def merging(t: Dtype, second: bool, by_sequence: bool) -> dict[str, Any]:
    lse = normal(4, 4, 512) if by_sequence else normal(4, T)
    step = lse[..., : lse.shape[-1] // 2].clone() if second else lse.clone()
    return {
        "out": packed(t), "out_per_step": packed(t, T // 2 if second else T), "old_lse": lse, "lse": lse + 1, "lse_per_step": step,
        "cu_seqlens": ENDS, "only_second_half": second, "lse_packed": not by_sequence,
    }  # fmt: skip


def correcting(first: str, second: str) -> Make:
    tokens = T // 2 if "none" in (first, second) else T
    return lambda t: {"grad": packed(t), "grad_per_step": packed(t, tokens), "cu_seqlens": ENDS, "first_half": first, "second_half": second}


THD: dict[str, Make] = {
    "thd_read_half_tensor": lambda t: {"tensor": packed(t), "cu_seqlens": ENDS, "half_idx": 1},
    "thd_second_half_lse_correction": lambda t: {"lse": normal(64, 2 * T), "lse_per_step": normal(64, T), "cu_seqlens": 2 * ENDS, "lse_packed": True},
    "thd_read_second_half_lse": lambda t: {"lse": normal(64, 2 * T), "cu_seqlens": 2 * ENDS, "lse_packed": True, "second_half_lse_seqlen": T},
    "thd_second_half_lse_correction by sequence": lambda t: {
        "lse": normal(4, 64, 512), "lse_per_step": normal(4, 64, 256), "cu_seqlens": ENDS, "lse_packed": False,
    },
    "thd_read_second_half_lse by sequence": lambda t: {
        "lse": normal(4, 64, 512), "cu_seqlens": ENDS, "lse_packed": False, "second_half_lse_seqlen": 256,
    },
    **{
        f"thd_out_correction second {second} by sequence {each}": lambda t, second=second, each=each: merging(t, second, each)
        for second in (False, True)
        for each in (False, True)
    },
    "thd_grad_correction": correcting("add", "copy"),
    "thd_grad_correction of both": correcting("add", "add"),
    "thd_grad_correction of a half": correcting("none", "add"),
    "thd_get_partitioned_indices": lambda t: {"cu_seqlens": counts(*[8] * 5000), "total_tokens": 40000, "world_size": 2, "rank": 1},
    "thd_sequence_order_to_cp_rank_order": lambda t: {"inp": packed(t), "cu_seqlens": ENDS, "cp_size": 4, "total_tokens": T},
    "thd_cp_rank_order_to_sequence_order": lambda t: {"inp": packed(t), "cu_seqlens": ENDS, "cp_size": 4, "total_tokens": T},
    "thd_copy_valid_tokens_from_per_split_to_rank_local": lambda t: {
        "out": packed(t), "inp": packed(t), "cu_seqlens_padded": ENDS, "cu_seqlens": counts(100, 128, 0, 300),
    },
    "convert_thd_to_bshd": lambda t: {"tensor": packed(t), "cu_seqlens": ENDS, "b": 4, "max_seq_len": 512},
    "convert_bshd_to_thd": lambda t: {"tensor": normal(4, 512, 4, 64, dtype=t), "cu_seqlens": ENDS, "t": T},
    "fa_prepare_fwd": lambda t: {"qkvi": normal(256, 4, 4, 192, dtype=t)[..., :64]},
    "fa_prepare_bwd": lambda t: {name: normal(4, 256, 4, 64, dtype=t) for name in "qkv"},
    "copy_to_kv_cache": lambda t: {
        "new_k": packed(t), "new_v": packed(t), "k_cache": normal(32, 64, 4, 64, dtype=t), "v_cache": normal(32, 64, 4, 64, dtype=t),
        "page_table": torch.arange(32, dtype=torch.int32).view(4, 8), "cu_new_lens": ENDS, "cu_cached_lens": ENDS,
        "kv_format": NVTE_QKV_Format.NVTE_THD, "b": 4, "max_ctx_len": 512, "max_seq_len": 512, "max_pages_per_seq": 8, "is_non_paged": False,
    },
    "prim_attention_step": lambda t: {
        "q": packed(t), "k": packed(t), "v": packed(t), "k_cache": normal(32, 64, 4, 64, dtype=t), "v_cache": normal(32, 64, 4, 64, dtype=t),
        "page_table": torch.arange(32, dtype=torch.int32).view(4, 8), "cu_new_lens": ENDS, "cu_cached_lens": ENDS,
        "angles": normal(512, 1, 1, 64), "start_positions": None, "interleaved": False, "max_new_len": 512, "window_size": (-1, -1), "scale": 0.125,
    },
}  # fmt: skip

EXPERTS, TOPK = 64, 4
TOKENS = 8192
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


def routing(score: str, t: Dtype, **more: Any) -> dict[str, Any]:
    return {"logits": normal(TOKENS, EXPERTS, dtype=t), **Router(score, TOPK, **more).arguments}


def routing_back(score: str, t: Dtype) -> dict[str, Any]:
    call = routing(score, t)
    _, routing_map, intermediate = REFERENCE("fused_topk_with_score_function_fwd", **call)
    wanted = {name: call[name] for name in ("topk", "use_pre_softmax", "scaling_factor", "score_function")}
    grads = {"grad_probs": normal(TOKENS, EXPERTS, dtype=t), "grad_logits": normal(TOKENS, EXPERTS, dtype=t)}
    return {"routing_map": routing_map, "intermediate_output": intermediate, **grads, **wanted}


def scoring_back(score: str, t: Dtype) -> dict[str, Any]:
    grads = {"grad_scores": normal(TOKENS, EXPERTS), "grad_logits": normal(TOKENS, EXPERTS, dtype=t)}
    return {"intermediate_output": normal(TOKENS, EXPERTS).abs(), **grads, "topk": TOPK, "score_function": score}


LOSS = {"num_experts": EXPERTS, "num_rows": TOKENS, "num_cols": EXPERTS, "topk": TOPK, "coeff": 0.1}
CODES = {FP32: DType.kFloat32, BF16: DType.kBFloat16}


def permuted(t: Dtype) -> dict[str, Any]:
    indices = torch.randint(0, 8, (1024, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    call = {"input": normal(1024, 256, dtype=t), "dtype": CODES[t], "indices": indices, "num_out_tokens": 2048, "workspace": []}
    return {**call, "max_expanded_token_num": 2048}


def back(t: Dtype) -> dict[str, Any]:
    moved, row_id_map, _ = REFERENCE("moe_permute_fwd", **permuted(t))
    return {"input": moved, "dtype": CODES[t], "row_id_map": row_id_map, "prob": torch.rand(1024, 2), "num_tokens": 1024, "topK": 2}


def back_of_back(t: Dtype) -> dict[str, Any]:
    call = back(t)
    named = {name: call[name] for name in ("dtype", "row_id_map", "prob")}
    return {"input_bwd": normal(1024, 256, dtype=t), "input_fwd": call["input"], **named}


MOE: dict[str, Make] = {
    **{f"fused_topk_with_score_function_fwd {s}": lambda t, s=s: routing(s, t) for s in SCORES},
    "fused_topk_with_score_function_fwd groups": lambda t: routing("sigmoid", t, groups=8, group_topk=4),
    **{f"fused_topk_with_score_function_bwd {s}": lambda t, s=s: routing_back(s, t) for s in SCORES},
    **{
        f"fused_score_for_moe_aux_loss_fwd {s}": lambda t, s=s: {"logits": normal(TOKENS, EXPERTS, dtype=t), "topk": TOPK, "score_function": s}
        for s in SCORES
    },
    **{f"fused_score_for_moe_aux_loss_bwd {s}": lambda t, s=s: scoring_back(s, t) for s in SCORES},
    "fused_topk_with_score_function_qb_fwd": lambda t: {
        "logits": normal(TOKENS, EXPERTS), "topk": TOPK, "scaling_factor": 2.0, "expert_bias": torch.zeros(EXPERTS), "routing_map_format": 1,
        "topk_indices": None, "histogram": torch.zeros(EXPERTS, 8, dtype=torch.int32), "bin_bounds": torch.tensor([-1.0, 1.0]), "histogram_mode": 1,
    },
    "fused_moe_aux_loss_fwd": lambda t: {
        "probs": normal(TOKENS, EXPERTS, dtype=t), "tokens_per_expert": torch.ones(EXPERTS, dtype=torch.int64), "total_num_tokens": TOKENS, **LOSS,
    },
    "fused_moe_aux_loss_fwd_graph_safe": lambda t: {
        "probs": normal(TOKENS, EXPERTS, dtype=t), "tokens_per_expert": torch.ones(EXPERTS, dtype=torch.int64),
        "total_num_tokens": torch.tensor(TOKENS), **LOSS,
    },
    "fused_moe_aux_loss_bwd": lambda t: {
        "Const_buf": torch.ones(2), "tokens_per_expert": torch.ones(EXPERTS, dtype=torch.int64), "num_rows": TOKENS, "num_cols": EXPERTS,
        "grad_aux_loss": torch.tensor(1.0, dtype=t),
    },
    "moe_permute_fwd": permuted,
    "moe_permute_bwd": back,
    "moe_unpermute_fwd": back,
    "moe_unpermute_bwd": back_of_back,
}  # fmt: skip


def quantized(name: str, t: Dtype) -> Any:
    return REFERENCE("quantize", tensor=matrix(t), quantizer=QUANTIZERS[name]())


def many(t: Dtype) -> list[Tensor]:
    return [normal(128, 512, dtype=t) for _ in range(4)]


def grouped(t: Dtype, single: bool) -> dict[str, Any]:
    nothing = [torch.empty(0)] * 4
    out = [torch.empty(512, 128, dtype=t)] if single else None
    return {
        "A": many(t), "transa": True, "B": many(t), "transb": False, "D": out or [torch.empty(128, 128, dtype=t) for _ in range(4)],
        "D_type": CODES[t], "m_splits": [128] * 4, "bias": nothing, "bias_type": DType.kBFloat16, "single_output": single, "pre_gelu_out": nothing,
        "grad": False, "workspace": [], "workspaceSize": 0, "accumulate": False, "use_split_accumulator": True, "math_sm_count": 0,
    }  # fmt: skip


SPLIT = torch.tensor([128, 256, 0, 128])
GROUP = {"num_tensors": 4, "first_dims": SPLIT}
REST: dict[str, Make] = {
    "generic_gemm": lambda t: gemm_call(matrix(t), True, matrix(t), False),
    "generic_gemm bias gelu": lambda t: gemm_call(
        matrix(t), True, matrix(t), False, bias=normal(ROWS, dtype=t), gelu=True, gelu_in=torch.zeros(1)
    ),
    "generic_gemm weight gradient": lambda t: gemm_call(matrix(t), False, matrix(t), True, D=torch.zeros(WIDTH, WIDTH), accumulate=True),
    "te_general_grouped_gemm": lambda t: grouped(t, False),
    "te_general_grouped_gemm single": lambda t: grouped(t, True),
    "group_quantize": lambda t: {"tensor": matrix(t), "quantizer": QUANTIZERS["current"](), **GROUP},
    "bgrad_group_quantize": lambda t: {"tensor": matrix(t), "quantizer": QUANTIZERS["current"](), **GROUP},
    "group_dequantize": lambda t: {"input": REFERENCE("group_quantize", **REST["group_quantize"](t)), "otype": t},
    "group_scaled_swiglu": lambda t: {"input_2h": matrix(t), "prob": torch.rand(ROWS), "quantizer": QUANTIZERS["current"](), **GROUP},
    "group_scaled_clamped_swiglu": lambda t: {
        "input_2h": matrix(t), "prob": torch.rand(ROWS), "quantizer": QUANTIZERS["current"](), **GROUP, "limit": 7.0,
    },
    "dropout_fwd": lambda t: {"input": matrix(t), "dropout_probability": 0.25},
    "dropout_bwd": lambda t: {"grad_output": matrix(t), "mask": torch.zeros(1 << 16, dtype=torch.uint8), "dropout_probability": 0.25},
    "compute_amax": lambda t: {"input": matrix(t), "amax": torch.zeros(1)},
    "fp8_transpose": lambda t: {"input": torch.zeros(ROWS, WIDTH, dtype=torch.uint8), "dtype": E4M3, "out": None},
    "multi_tensor_scale": lambda t: {
        "chunk_size": 1, "noop_flag": torch.zeros(1, dtype=torch.int32), "tensor_lists": [many(t), many(t)], "scale": 2.0,
    },
    "multi_tensor_l2norm": lambda t: {
        "chunk_size": 1, "noop_flag": torch.zeros(1, dtype=torch.int32), "tensor_lists": [many(t)], "per_tensor_python": True,
    },
    "split_quantize": lambda t: {
        "tensor": matrix(t), "split_sections": [128, 384], "quantizer_list": [QUANTIZERS["mxfp8"](), QUANTIZERS["nvfp4"]()],
    },
    "multi_tensor_quantize": lambda t: {
        "tensor_list": [matrix(t), matrix(t)], "quantizer_list": [QUANTIZERS["blocks-1d"](), QUANTIZERS["nvfp4"]()],
    },
    "nvfp4_quantize_with_amax": lambda t: {
        "tensor": matrix(t), "quantizer": NVFP4Quantizer(), "rowwise_amax": torch.tensor([5.0]), "columnwise_amax": torch.tensor([5.0]),
    },
    "swizzle_scales_for_gemm_": lambda t: {"tensor": quantized("mxfp8", t)},
    "prim_dropout": lambda t: {"x": matrix(t), "probability": 0.3, "seed": torch.tensor([42]), "offset": 0},
    "prim_dropout_backward": lambda t: {"dy": matrix(t), "mask": torch.ones(ROWS, WIDTH, dtype=torch.uint8), "probability": 0.3},
    "prim_add": lambda t: {"a": matrix(t), "b": matrix(t)},
    "prim_scale": lambda t: {"x": matrix(t), "factor": 0.3},
    "prim_permute": lambda t: {"x": matrix(t), "dims": (1, 0)},
    "prim_put_along": lambda t: {"y": matrix(t)[:, :8], "indices": torch.arange(8).repeat(len(matrix(t)), 1), "columns": 64},
    "prim_row_sum": lambda t: {"x": matrix(t)},
    "prim_take_along": lambda t: {"x": matrix(t), "indices": torch.arange(64).repeat(len(matrix(t)), 1)},
    "prim_transpose": lambda t: {"x": matrix(t)},
    "prim_cast": lambda t: {"x": matrix(t), "dtype": torch.float16},
    "prim_concatenate": lambda t: {"tensors": [matrix(t), matrix(t)], "dim": 1},
}  # fmt: skip


def of_formats() -> dict[str, tuple[str, Make]]:
    """Quantizing, and back, products, biases' gradients and activations, in each format."""
    calls: dict[str, tuple[str, Make]] = {}
    for name, make in QUANTIZERS.items():
        calls[f"quantize {name}"] = "quantize", lambda t, make=make: {"tensor": matrix(t), "quantizer": make()}
        calls[f"dequantize {name}"] = "dequantize", lambda t, n=name: {"input": quantized(n, t), "otype": t}
        calls[f"bgrad_quantize {name}"] = "bgrad_quantize", lambda t, make=make: {"input": matrix(t), "quantizer": make()}
        calls[f"gelu {name}"] = "gelu", lambda t, make=make: {"input": matrix(t), "quantizer": make()}
        calls[f"rmsnorm_fwd {name}"] = "rmsnorm_fwd", lambda t, make=make: {**forward_norm(t), "quantizer": make()}
        calls[f"layernorm_fwd {name}"] = "layernorm_fwd", lambda t, make=make: {**NORMS["layernorm_fwd"](t), "quantizer": make()}
        if "columns" in name:
            continue
        calls[f"gemm {name}"] = "generic_gemm", lambda t, n=name: gemm_call(quantized(n, t), True, quantized(n, t), False, output_dtype=t)
    return calls


CALLS: dict[str, tuple[str, Make]] = {
    **{name: (name.split()[0], make) for table in (activations(), NORMS, SOFTMAX, ROTATIONS, THD, MOE, REST) for name, make in table.items()},
    **of_formats(),
    **{f"fused_attn_fwd {name}": ("fused_attn_fwd", lambda t, p=p: attending(p, t)) for name, p in PROBLEMS.items()},
    **{f"fused_attn_bwd {name}": ("fused_attn_bwd", lambda t, p=p: attending_backward(p, t)) for name, p in PROBLEMS.items()},
}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_holds_at_most_three_times_its_arguments_and_results(name: str, dtype: Dtype) -> None:
    function, make = CALLS[name]
    check_peak(function, make(dtype))
