"""What the interface promises beyond numbers: signatures, argument forms, outputs given, and refusals."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tex_backends import REFERENCE, Runner, on_backends, runners
from tex_signatures_casts import CASTS

from fusible import tex
from fusible.conformance.table import close
from fusible.errors import ArgumentError, DTypeError, NotServedError, ShapeError
from fusible.quantized import Float8Quantizer
from fusible.tex import DType, NVTE_QKV_Format
from fusible.tex.interface.declare import DECLARATIONS

NORMS = on_backends("layernorm_fwd", "rmsnorm_fwd")
GELUS = on_backends("gelu", "dgelu", "dbias_dgelu", "dbias_drelu")

POINTWISE = "glu gelu geglu qgelu qgeglu relu reglu srelu sreglu silu swiglu".split()
NORM = "eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma"
ATTENTION = "bias_type, attn_mask_type, softmax_type, window_size, bottom_right_diagonal"
PADDED = "cu_seqlens_q_padded, cu_seqlens_kv_padded"
ROPE = "freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank"
CLAMP = "limit=7.0, alpha=1.702, glu_linear_offset=1.0"
SIGNATURES = {
    **{name: "input, quantizer" for name in POINTWISE},
    **{f"d{name}": "grad, fwd_input, quantizer" for name in POINTWISE},
    **{f"dbias_d{name}": "grad, fwd_input, quantizer" for name in "gelu silu relu qgelu srelu".split()},
    **{name: "input, quantizer" for name in ("erf_gelu", "erf_geglu")},
    **{name: "grad, fwd_input, quantizer" for name in ("erf_dgelu", "erf_dgeglu", "dbias_erf_dgelu")},
    "situglu": "input, quantizer, beta1=4.0, beta2=25.0",
    "dsituglu": "grad, fwd_input, quantizer, beta1=4.0, beta2=25.0",
    "clamped_swiglu": f"input, quantizer, {CLAMP}",
    "clamped_dswiglu": f"grad, fwd_input, quantizer, {CLAMP}",
    "quantize": "tensor, quantizer, output=None, noop=None",
    "dequantize": "input, otype",
    "bgrad_quantize": "input, quantizer",
    "create_empty_quantized_tensor": "quantizer, shape, dtype, device, pin_memory",
    "generic_gemm": "A, transA, B, transB, D, quantizer, output_dtype, bias, bias_type, gelu, gelu_in, grad, workspace, workspace_size, accumulate, "
    "use_split_accumulator, comm_overlap=None, comm_type=None, extra_output=None, bulk_overlap=False, alpha=1.0, beta=None",
    "layernorm_fwd": f"input, weight, bias, {NORM}",
    "layernorm_bwd": "dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma",
    "rmsnorm_fwd": f"input, weight, {NORM}",
    "rmsnorm_bwd": "dz, x, rsigma, gamma, sm_margin, zero_centered_gamma",
    "rmsnorm_bwd_add": "dz, x, add, rsigma, gamma, sm_margin, zero_centered_gamma",
    "fused_attn_fwd": "max_seqlen_q, max_seqlen_kv, is_training, attn_scale, p_dropout, set_zero, qkv_layout, o_format, qkv_scale_inv_format, "
    f"{ATTENTION}, cu_seqlens_q, cu_seqlens_kv, Q, K, V, fake_dtype, {PADDED}, page_table_k, page_table_v, s_quantizer, o_quantizer, Bias, "
    "SoftmaxOffset, rng_gen, rng_elts_per_thread, return_max_logit, cuda_graph",
    "fused_attn_bwd": "max_seqlen_q, max_seqlen_kv, attn_scale, p_dropout, set_zero, qkv_layout, o_format, do_format, dqkv_layout, "
    f"qkv_scale_inv_format, do_scale_inv_format, {ATTENTION}, deterministic, cu_seqlens_q, cu_seqlens_kv, Q, K, V, O, dO, fake_dtype, "
    f"Aux_CTX_Tensors, {PADDED}, s_quantizer, dp_quantizer, dqkv_quantizer, cuda_graph",
    "get_fused_attn_backend": "fused_attn_params=None, *arguments, **named",
    "copy_to_kv_cache": "new_k, new_v, k_cache, v_cache, page_table, cu_new_lens, cu_cached_lens, kv_format, b, max_ctx_len, max_seq_len, "
    "max_pages_per_seq, is_non_paged",
    "fused_rope_forward": f"input, {ROPE}",
    "fused_rope_backward": f"output_grads, {ROPE}",
    "fused_qkv_rope_forward": "qkv_input, q_freqs, k_freqs, start_positions, qkv_split_arg_list, qkv_format, interleaved, cp_size, cp_rank",
    "fused_qkv_rope_backward": "q_grad_out, k_grad_out, v_grad_out, q_freqs, k_freqs, qkv_split_arg_list, qkv_format, interleaved, cp_size, cp_rank",
    "fa_prepare_fwd": "qkvi",
    "fa_prepare_bwd": "q, k, v",
    "convert_thd_to_bshd": "tensor, cu_seqlens, b, max_seq_len",
    "convert_bshd_to_thd": "tensor, cu_seqlens, t",
    "thd_read_half_tensor": "tensor, cu_seqlens, half_idx",
    "thd_second_half_lse_correction": "lse, lse_per_step, cu_seqlens, lse_packed",
    "thd_read_second_half_lse": "lse, cu_seqlens, lse_packed, second_half_lse_seqlen",
    "thd_out_correction": "out, out_per_step, old_lse=None, lse=None, lse_per_step=None, cu_seqlens=None, only_second_half=None, lse_packed=None",
    "thd_grad_correction": "grad, grad_per_step, cu_seqlens, first_half, second_half",
    "thd_get_partitioned_indices": "cu_seqlens, total_tokens, world_size, rank",
    "thd_sequence_order_to_cp_rank_order": "inp, cu_seqlens, cp_size, total_tokens",
    "thd_cp_rank_order_to_sequence_order": "inp, cu_seqlens, cp_size, total_tokens",
    "thd_copy_valid_tokens_from_per_split_to_rank_local": "out, inp, cu_seqlens_padded, cu_seqlens",
    "scaled_softmax_forward": "input, scale_factor",
    "scaled_softmax_backward": "output_grad_, softmax_results_, scale_factor",
    "scaled_masked_softmax_forward": "input, mask, scale_factor",
    "scaled_masked_softmax_backward": "output_grad_, softmax_results_, scale_factor",
    **{f"scaled_{mask}_masked_softmax_forward": "input, scale_factor" for mask in ("upper_triang", "aligned_causal")},
    **{f"scaled_{mask}_masked_softmax_backward": "output_grads_, softmax_results_, scale_factor" for mask in ("upper_triang", "aligned_causal")},
    "dropout_fwd": "input, dropout_probability, out=None",
    "dropout_bwd": "grad_output, mask, dropout_probability, grad_input=None",
    "fp8_transpose": "input, dtype, *, out",
    "compute_amax": "input, amax",
    "fused_amax_and_scale_update_after_reduction": "amax_reduction_buffer, amax_histories, scales, amax_compute_algo, fp8_dtype, margin",
    "multi_tensor_scale": "chunk_size, noop_flag, tensor_lists, scale",
    "multi_tensor_l2norm": "chunk_size, noop_flag, tensor_lists, per_tensor_python",
    "multi_tensor_adam": "chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay",
    **CASTS,
}


@pytest.mark.parametrize(("function", "signature"), SIGNATURES.items(), ids=SIGNATURES.keys())
def test_signatures_are_nvidias(function: str, signature: str) -> None:
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(getattr(tex, function)).parameters.values()]
    assert str(inspect.Signature(parameters)) == f"({signature})"


def test_every_declaration_is_documented_and_asks_by_parameters_without_default() -> None:
    for declaration in DECLARATIONS.values():
        assert declaration.doc
        for ask in declaration.asks:
            assert declaration.signature.parameters[ask].default is inspect.Parameter.empty, (declaration.name, ask)


def test_every_declared_function_is_served_by_the_reference() -> None:
    reference = tex.backends.torch_backend.TorchBackend
    unserved = [name for name in SIGNATURES if getattr(reference, name) is getattr(tex.TEXBackendBase, name)]
    assert not unserved


NORM_OPTIONS = {"eps": 1e-5, "ln_out": None, "quantizer": None, "otype": torch.float32, "sm_margin": 0, "zero_centered_gamma": False}


@NORMS
@pytest.mark.parametrize("otype", [torch.bfloat16, DType.kBFloat16, 6])
@pytest.mark.parametrize("function", ["layernorm_fwd", "rmsnorm_fwd"])
def test_norms_give_otype_and_write_ln_out(runner: Runner, function: str, otype: Any) -> None:
    x, w = torch.randn(3, 8), torch.randn(8)
    bias = {"bias": w} if function == "layernorm_fwd" else {}
    y = runner(function, input=x, weight=w, **bias, **{**NORM_OPTIONS, "otype": otype})[0]
    assert y.dtype is torch.bfloat16
    out = torch.zeros(3, 8, dtype=torch.bfloat16)
    assert runner(function, input=x, weight=w, **bias, **{**NORM_OPTIONS, "otype": otype, "ln_out": out})[0] is out
    assert torch.equal(out, y)


@NORMS
@pytest.mark.parametrize("function", ["layernorm_fwd", "rmsnorm_fwd"])
def test_norms_write_a_quantized_ln_out(runner: Runner, function: str) -> None:
    x, w = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)), torch.ones(8)
    bias = {"bias": None} if function == "layernorm_fwd" else {}
    quantizer = Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), DType.kFloat8E4M3)
    out = runner(
        "create_empty_quantized_tensor", quantizer=quantizer, shape=[3, 8], dtype=torch.float32, device=torch.device("cpu"), pin_memory=False
    )
    assert runner(function, input=x, weight=w, **bias, **{**NORM_OPTIONS, "ln_out": out, "quantizer": quantizer})[0] is out
    y = runner(function, input=x, weight=w, **bias, **NORM_OPTIONS)[0]
    assert torch.equal(out._data, REFERENCE("quantize", tensor=y, quantizer=quantizer)._data)


@NORMS
def test_statistics_are_flat_fp32_whatever_the_input(runner: Runner) -> None:
    x, w = torch.randn(2, 3, 8).to(torch.bfloat16), torch.randn(8).to(torch.bfloat16)
    for function, bias in (("layernorm_fwd", {"bias": None}), ("rmsnorm_fwd", {})):
        _, mu, rsigma = runner(function, input=x, weight=w, **bias, **{**NORM_OPTIONS, "otype": torch.bfloat16})
        assert all(s is None or (s.shape == (6,) and s.dtype is torch.float32) for s in (mu, rsigma))


@GELUS
def test_dbias_sums_the_gradient_after_the_derivative(runner: Runner) -> None:
    grad, x = torch.ones(3, 4), -torch.ones(3, 4)
    bias_grad, dx = runner("dbias_drelu", grad=grad, fwd_input=x, quantizer=None)
    assert not bias_grad.any() and not dx.any()


@GELUS
def test_backward_has_the_dtype_of_the_forward_input_and_dbias_that_of_the_gradient(runner: Runner) -> None:
    grad, x = torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bfloat16)
    assert runner("dgelu", grad=grad, fwd_input=x, quantizer=None).dtype is torch.bfloat16
    assert [y.dtype for y in runner("dbias_dgelu", grad=grad, fwd_input=x, quantizer=None)] == [torch.float32] * 2


@GELUS
def test_a_quantized_tensor_is_an_input_like_its_value(runner: Runner) -> None:
    quantizer = Float8Quantizer(torch.ones(1), None, DType.kFloat8E4M3)
    for internal in (False, True):
        quantizer.internal = internal
        x = REFERENCE("quantize", tensor=torch.ones(2, 4), quantizer=quantizer)
        assert torch.equal(runner("gelu", input=x, quantizer=None), runner("gelu", input=torch.ones(2, 4), quantizer=None))


X = torch.zeros(3, 8)
ROPE_CALL = {
    "input": torch.zeros(4, 2, 1, 8),
    "freqs": torch.zeros(4, 1, 1, 8),
    "start_positions": None,
    "qkv_format": NVTE_QKV_Format.NVTE_SBHD,
    "interleaved": False,
    "cu_seqlens": None,
    "cp_size": 1,
    "cp_rank": 0,
}
SCORES_CALL = {"input": torch.zeros(2, 3, 4, 5), "scale_factor": 1.0}
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("swiglu", {"input": torch.zeros(2, 3), "quantizer": None}, ShapeError, "an even last dimension"),
    ("dswiglu", {"grad": torch.zeros(2, 4), "fwd_input": torch.zeros(2, 4), "quantizer": None}, ShapeError, r"grad .*: expected shape \[2, 2\]"),
    ("dgelu", {"grad": torch.zeros(2, 3), "fwd_input": torch.zeros(2, 4), "quantizer": None}, ShapeError, r"grad .*: expected shape \[2, 4\]"),
    ("dbias_dgelu", {"grad": torch.zeros(3), "fwd_input": torch.zeros(2, 3), "quantizer": None}, ShapeError, r"grad .*: expected shape \[2, 3\]"),
    ("rmsnorm_fwd", {"input": X, "weight": torch.zeros(7), **NORM_OPTIONS}, ShapeError, r"weight .*: expected shape \[8\]"),
    ("layernorm_fwd", {"input": X, "weight": torch.zeros(8), "bias": torch.zeros(7), **NORM_OPTIONS}, ShapeError, r"bias .*: expected shape \[8\]"),
    ("rmsnorm_fwd", {"input": X, "weight": torch.zeros(8), **NORM_OPTIONS, "ln_out": torch.zeros(3, 7)}, ShapeError, r"shape \[3, 8\]"),
    ("rmsnorm_fwd", {"input": X, "weight": torch.zeros(8), **NORM_OPTIONS, "ln_out": X.bfloat16()}, DTypeError, "ln_out .*: expected torch.float32"),
    (
        "rmsnorm_bwd",
        {"dz": X, "x": X, "rsigma": torch.zeros(2), "gamma": torch.zeros(8), "sm_margin": 0, "zero_centered_gamma": False},
        ShapeError,
        r"rsigma .*: expected shape \[3\]",
    ),
    ("fused_rope_forward", {**ROPE_CALL, "freqs": torch.zeros(3, 1, 1, 8)}, ShapeError, "freqs .*: expected positions among 3"),
    ("fused_rope_forward", {**ROPE_CALL, "freqs": torch.zeros(4, 1, 1, 7)}, ShapeError, "an even width up to 8"),
    ("fused_rope_forward", {**ROPE_CALL, "freqs": torch.zeros(4, 8)}, ShapeError, r"fp32 \[positions, 1, 1, width\]"),
    ("fused_rope_forward", {**ROPE_CALL, "input": torch.zeros(4, 1, 8)}, ShapeError, "4 dimensions"),
    ("fused_rope_forward", {**ROPE_CALL, "cp_size": 2, "cp_rank": 2}, ArgumentError, "0 <= cp_rank < cp_size"),
    ("fused_rope_forward", {**ROPE_CALL, "input": torch.zeros(4, 1, 8), "qkv_format": 2}, ArgumentError, "cu_seqlens"),
    ("fused_rope_forward", {**ROPE_CALL, "qkv_format": 7}, ArgumentError, "SBHD, BSHD or THD"),
    ("scaled_softmax_forward", {"input": X, "scale_factor": 1.0}, ShapeError, r"scores \[b, h, q, k\]"),
    ("scaled_upper_triang_masked_softmax_forward", {"input": torch.zeros(2, 3, 4), "scale_factor": 1.0}, ShapeError, r"\[b \* h, s, s\]"),
    ("scaled_masked_softmax_forward", {**SCORES_CALL, "mask": torch.zeros(2, 3, 4, 5).byte()}, ShapeError, r"mask .*: expected \[2 or 1, 1, 4, 5\]"),
    ("scaled_masked_softmax_forward", {**SCORES_CALL, "mask": torch.zeros(2, 1, 4, 5)}, DTypeError, "mask .*: expected .*uint8 or bool"),
    (
        "scaled_softmax_backward",
        {"output_grad_": torch.zeros(2, 3, 4, 4), "softmax_results_": SCORES_CALL["input"], "scale_factor": 1.0},
        ShapeError,
        r"output_grad_ .*: expected shape \[2, 3, 4, 5\]",
    ),
    (
        "scaled_softmax_backward",
        {"output_grad_": SCORES_CALL["input"].half(), "softmax_results_": SCORES_CALL["input"], "scale_factor": 1.0},
        DTypeError,
        "output_grad_ of scaled_softmax_backward: expected .*",
    ),
]


@pytest.mark.parametrize(("runner", "function", "arguments", "error", "message"), [(r, *row) for row in REFUSED for r in runners(row[0])])
def test_what_does_not_fit_is_refused_in_one_sentence(
    runner: Runner, function: str, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        runner(function, **arguments)
    text = str(caught.value)
    assert ": expected " in text and text.endswith(".") and "\n" not in text


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.uint8])
def test_a_type_that_no_backend_serves_is_refused_with_the_reasons(dtype: torch.dtype) -> None:
    with pytest.raises(NotServedError, match="torch: serves float32, bfloat16, float16 and float64, and input is torch"):
        tex.gelu(torch.ones(2, dtype=dtype), None)


def test_tokens_beyond_the_last_sequence_are_zero_and_start_positions_apply_to_thd() -> None:
    freqs = torch.rand(16, 1, 1, 4)
    x = torch.randn(6, 1, 4)
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    start = torch.tensor([3, 1], dtype=torch.int32)
    y = tex.fused_rope_forward(x, freqs, start, NVTE_QKV_Format.NVTE_THD, False, cu, 1, 0)
    assert not y[5].any()
    whole = [tex.fused_rope_forward(part[:, None], freqs[s:], None, 0, False, None, 1, 0)[:, 0] for part, s in ((x[:2], 3), (x[2:5], 1))]
    torch.testing.assert_close(y[:5], torch.cat(whole), rtol=0, atol=0)


@on_backends("fused_rope_forward", "fused_rope_backward")
@pytest.mark.parametrize(("function", "argument"), [("fused_rope_forward", "input"), ("fused_rope_backward", "output_grads")])
def test_rope_takes_heads_cut_out_of_a_packed_tensor_and_quantized_ones(runner: Runner, function: str, argument: str) -> None:
    call = {**{name: value for name, value in ROPE_CALL.items() if name != "input"}, "freqs": torch.rand(4, 1, 1, 8)}
    packed = torch.randn(4, 2, 3, 5, 8, generator=torch.Generator().manual_seed(2))
    for x in (packed[:, :, 1], packed[:, :, 0, 1:3], packed.transpose(-1, -2)[:, :, 0, :, 1:].transpose(-1, -2), packed[:, :, 0, ::2]):
        y, same = (runner(function, **{argument: given}, **call) for given in (x, x.contiguous()))
        assert y.is_contiguous()
        close(y, same.double(), torch.float32)
    quantized = REFERENCE("quantize", tensor=packed[:, :, 0].contiguous(), quantizer=Float8Quantizer(torch.ones(1), None, DType.kFloat8E4M3))
    value = REFERENCE("dequantize", input=quantized, otype=torch.float32)
    y, same = (runner(function, **{argument: given}, **call) for given in (quantized, value))
    close(y, same.double(), torch.float32)
