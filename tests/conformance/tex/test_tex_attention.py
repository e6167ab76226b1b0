"""Fused attention, forward and backward, against float64 autograd."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tex_attention import B, F, L, M, Problem, S, Tensors, backward, cumulative, cut, forward, reference, tensors
from tex_backends import Runner, on_backends
from torch import Tensor

from fusible.conformance.table import close
from fusible.errors import ArgumentError, NotServedError, ShapeError
from fusible.tex import NVTE_Fused_Attn_Backend, NVTEScalingMode
from fusible.tex.backends.torch_backend.random import words

pytestmark = on_backends("fused_attn_fwd", "fused_attn_bwd", "get_fused_attn_backend")

RAGGED = {"lengths_q": (5, 2, 7), "lengths_kv": (6, 3, 1)}
PROBLEMS = {
    "plain": Problem(),
    "bf16": Problem(dtype=torch.bfloat16, mask=M.NVTE_CAUSAL_MASK, groups=2),
    "fp16": Problem(dtype=torch.float16, layout=L.NVTE_SBHD_SBHD_SBHD),
    "sbhd": Problem(layout=L.NVTE_SBHD_SBHD_SBHD, mask=M.NVTE_CAUSAL_MASK, lengths_kv=(7, 7)),
    "bhsd": Problem(layout=L.NVTE_BHSD_BHSD_BHSD),
    "causal": Problem(mask=M.NVTE_CAUSAL_MASK, lengths_kv=(7, 7)),
    "bottom right": Problem(mask=M.NVTE_CAUSAL_BOTTOM_RIGHT_MASK, lengths_kv=(7, 7)),
    "bottom right with rows that see nothing": Problem(mask=M.NVTE_CAUSAL_BOTTOM_RIGHT_MASK, lengths_kv=(3, 3)),
    "grouped": Problem(groups=2),
    "one kv head": Problem(groups=1, mask=M.NVTE_CAUSAL_MASK),
    "two widths": Problem(width_v=3),
    "window": Problem(window=(1, 2), lengths_kv=(8, 8)),
    "window bottom right": Problem(window=(2, 0), bottom_right_diagonal=True, lengths_kv=(8, 8), mask=M.NVTE_CAUSAL_BOTTOM_RIGHT_MASK),
    "padding": Problem(mask=M.NVTE_PADDING_MASK, **RAGGED),
    "padding causal": Problem(mask=M.NVTE_PADDING_CAUSAL_MASK, layout=L.NVTE_SBHD_SBHD_SBHD, **RAGGED),
    "padding bottom right": Problem(mask=M.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK, **RAGGED),
    "thd": Problem(layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_MASK, groups=2, **RAGGED),
    "thd causal": Problem(layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_CAUSAL_MASK, **RAGGED),
    "thd bottom right": Problem(layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK, **RAGGED),
    "thd of equal lengths": Problem(layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_CAUSAL_MASK, lengths_q=(4, 4, 4), lengths_kv=(4, 4, 4)),
    "thd with gaps": Problem(layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_CAUSAL_MASK, gap=2, **RAGGED),
    "thd with an empty sequence": Problem(layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_MASK, lengths_q=(3, 0, 2), lengths_kv=(3, 4, 0)),
    "thd queries of a dense cache": Problem(layout=L.NVTE_THD_BSHD_BSHD, mask=M.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK, **RAGGED),
    "mixed formats": Problem(layout=L.NVTE_SBHD_BSHD_BSHD, lengths_kv=(6, 6)),
    "mixed formats, sequences first": Problem(layout=L.NVTE_BSHD_SBHD_SBHD, lengths_kv=(6, 6), mask=M.NVTE_CAUSAL_BOTTOM_RIGHT_MASK),
    "thd queries of a cache of sequences first": Problem(layout=L.NVTE_THD_SBHD_SBHD, mask=M.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK, **RAGGED),
    "off by one": Problem(softmax=S.NVTE_OFF_BY_ONE_SOFTMAX, mask=M.NVTE_CAUSAL_BOTTOM_RIGHT_MASK, lengths_kv=(3, 3)),
    "learnable": Problem(softmax=S.NVTE_LEARNABLE_SOFTMAX, mask=M.NVTE_CAUSAL_MASK, groups=2),
    "learnable thd": Problem(softmax=S.NVTE_LEARNABLE_SOFTMAX, layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_MASK, **RAGGED),
    "pre-scale bias": Problem(bias_type=B.NVTE_PRE_SCALE_BIAS, lengths_kv=(7, 7)),
    "post-scale bias": Problem(bias_type=B.NVTE_POST_SCALE_BIAS, mask=M.NVTE_CAUSAL_MASK),
    "post-scale bias per sequence": Problem(bias_type=B.NVTE_POST_SCALE_BIAS, options={"bias_batch": 2}),
    "dropout": Problem(dropout=0.3, groups=2, mask=M.NVTE_CAUSAL_MASK),
    "dropout thd": Problem(dropout=0.3, layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_MASK, **RAGGED),
    "alibi": Problem(bias_type=B.NVTE_ALIBI, heads=6, groups=6, lengths_kv=(7, 7)),
    "alibi bottom right": Problem(bias_type=B.NVTE_ALIBI, mask=M.NVTE_PADDING_CAUSAL_MASK, bottom_right_diagonal=True, **RAGGED),
    "gradients of another order": Problem(options={"dqkv_layout": L.NVTE_SBHD_BSHD_BSHD}, mask=M.NVTE_CAUSAL_MASK),
    "other output format": Problem(o_format=F.NVTE_SBHD, mask=M.NVTE_CAUSAL_MASK),
}


def kept(problem: Problem, rng_state: Tensor) -> list[Tensor | None]:
    """Per sequence, which scores ``[h, max_q, max_kv]`` dropout keeps."""
    count = len(problem.lengths_q)
    if not problem.dropout:
        return [None] * count
    size = problem.heads * problem.max_q * problem.max_kv
    drawn = words(rng_state[:1], torch.arange(count * size) + rng_state[1] * 2**40)
    return list((drawn >= int(problem.dropout * 2**32)).view(count, problem.heads, problem.max_q, problem.max_kv))


def o_name(problem: Problem) -> str:
    return problem.formats[0] if problem.o_format == F.NVTE_QKV_Format_NOT_SET else problem.o_format.name.removeprefix("NVTE_")


def expectation(problem: Problem, given: Tensors, rng_state: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """``(O, Stats, leaves, upstream gradients)`` per sequence in float64; the leaves are q, k, v of each, then bias and offset."""
    leaves = [x.double().requires_grad_() for x in (*given.q, *given.k, *given.v)]
    side = [x.double().requires_grad_() for x in (given.bias, given.offset) if x is not None]
    n = len(given.q)
    bias = side[0] if given.bias is not None else None
    offset = side[-1].flatten() if given.offset is not None else None
    if problem.softmax == S.NVTE_OFF_BY_ONE_SOFTMAX:
        offset = torch.zeros(problem.heads, dtype=torch.float64)
    outputs, stats, upstream = [], [], []
    generator = torch.Generator().manual_seed(9)
    for i, keep in enumerate(kept(problem, rng_state)):
        own_bias = None if bias is None else bias[i if bias.shape[0] > 1 else 0]
        o, lse = reference(problem, leaves[i], leaves[n + i], leaves[2 * n + i], own_bias, offset, keep)
        outputs.append(o)
        stats.append(lse.detach())
        upstream.append(torch.randn(o.shape, generator=generator).to(problem.dtype))
    return outputs, stats, leaves + side, upstream


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_forward_and_backward(runner: Runner, problem: Problem) -> None:
    given = tensors(problem)
    o, stats, rng_state, *side = forward(runner, problem, given)
    assert o.dtype is problem.dtype and o.is_contiguous() and rng_state.shape == (2,) and rng_state.dtype is torch.int64
    assert stats.dtype is torch.float32 and all(a is b for a, b in zip(side, [x for x in (given.bias, given.offset) if x is not None], strict=True))
    outputs, expected_stats, leaves, upstream = expectation(problem, given, rng_state)
    length = problem.width + problem.max_kv
    name = o_name(problem)
    # A backend may round probabilities, which sum to at most 1, to the inputs' type: half an epsilon of the largest value.
    largest = max(x.abs().max().item() for x in given.v if x.numel())
    rounding = 0.5 * torch.finfo(problem.dtype).eps * largest / torch.finfo(torch.float32).eps / (length + 16)
    for got, expected in zip(cut(o, name, problem.lengths_q, problem.gap), outputs, strict=True):
        close(got, expected.detach(), problem.dtype, length, 8.0 + rounding)
    stats_format = "THD" if problem.formats[0] == "THD" else "BHSD"
    for got, expected in zip(cut(stats, stats_format, problem.lengths_q, problem.gap), expected_stats, strict=True):
        close(got[..., 0].t(), expected, torch.float32, length, 8.0)

    do = torch.zeros_like(o)
    for part, gradient in zip(cut(do, name, problem.lengths_q, problem.gap), upstream, strict=True):
        part.copy_(gradient)
    dq, dk, dv, dbias, doffset = backward(runner, problem, given, o, do, [stats, rng_state, *side])
    total = sum((x * g.double()).sum() for x, g in zip(outputs, upstream, strict=True))
    gradients = list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
    n = len(given.q)
    loose = {torch.float32: 1.0, torch.bfloat16: 2.0**16, torch.float16: 2.0**13}[problem.dtype]
    dq_name, dkv_name = replace(problem, layout=problem.options.get("dqkv_layout", problem.layout)).formats
    for got, expected, lengths, part_name in (
        (dq, gradients[:n], problem.lengths_q, dq_name),
        (dk, gradients[n : 2 * n], problem.lengths_kv, dkv_name),
        (dv, gradients[2 * n : 3 * n], problem.lengths_kv, dkv_name),
    ):
        assert got.dtype is problem.dtype
        for mine, theirs in zip(cut(got, part_name, lengths, problem.gap), expected, strict=True):
            close(mine, theirs, problem.dtype, length, 16.0 * loose)
    for got, there in ((dbias, given.bias), (doffset, given.offset)):
        assert (got is None) == (there is None)
        if there is not None:
            assert got.shape == there.shape
            close(got, gradients[3 * n if there is given.bias else -1], got.dtype, length, 32.0)


@pytest.mark.parametrize("name", ["plain", "padding", "thd with gaps"])
def test_rows_of_no_sequence_are_zero(runner: Runner, name: str) -> None:
    problem = PROBLEMS[name]
    given = tensors(problem)
    o = forward(runner, problem, given)[0]
    for part in cut(o, o_name(problem), problem.lengths_q, problem.gap):
        part.zero_()
    assert not o.any()


PACKED = [
    (L.NVTE_SB3HD, L.NVTE_SBHD_SBHD_SBHD, 3, 2),
    (L.NVTE_SBH3D, L.NVTE_SBHD_SBHD_SBHD, 3, 3),
    (L.NVTE_BS3HD, L.NVTE_BSHD_BSHD_BSHD, 3, 2),
    (L.NVTE_BSH3D, L.NVTE_BSHD_BSHD_BSHD, 3, 3),
    (L.NVTE_SBHD_SB2HD, L.NVTE_SBHD_SBHD_SBHD, 2, 2),
    (L.NVTE_SBHD_SBH2D, L.NVTE_SBHD_SBHD_SBHD, 2, 3),
    (L.NVTE_BSHD_BS2HD, L.NVTE_BSHD_BSHD_BSHD, 2, 2),
    (L.NVTE_BSHD_BSH2D, L.NVTE_BSHD_BSHD_BSHD, 2, 3),
    (L.NVTE_T3HD, L.NVTE_THD_THD_THD, 3, 1),
    (L.NVTE_TH3D, L.NVTE_THD_THD_THD, 3, 2),
    (L.NVTE_THD_T2HD, L.NVTE_THD_THD_THD, 2, 1),
    (L.NVTE_THD_TH2D, L.NVTE_THD_THD_THD, 2, 2),
]


@pytest.mark.parametrize(("packed", "separate", "count", "at"), PACKED)
def test_packed_layouts_equal_separate_ones_and_give_views_of_one_buffer(runner: Runner, packed: Any, separate: Any, count: int, at: int) -> None:
    lengths = {"lengths_q": (3, 3, 3), "lengths_kv": (3, 3, 3)}
    problem = Problem(layout=separate, mask=M.NVTE_PADDING_CAUSAL_MASK if "THD" in separate.name else M.NVTE_CAUSAL_MASK, **lengths)
    given = tensors(problem)
    buffer = torch.stack(given.packed[3 - count :], at)
    views = replace(given, packed=(*given.packed[: 3 - count], *buffer.unbind(at)))
    outputs = [forward(runner, p, t) for p, t in ((problem, given), (replace(problem, layout=packed), views))]
    assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])
    do = torch.randn(outputs[0][0].shape, generator=torch.Generator().manual_seed(2))
    expected = backward(runner, problem, given, outputs[0][0], do, outputs[0][1:])
    got = backward(runner, replace(problem, layout=packed), views, outputs[1][0], do, outputs[1][1:])
    assert all(torch.equal(a, b) for a, b in zip(expected[:3], got[:3], strict=True))
    parts = got[3 - count : 3]
    assert all(part.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr() for part in parts)
    assert [part.storage_offset() for part in parts] == [i * buffer.stride(at) for i in range(count)]


def test_max_logit_comes_after_stats_and_is_not_for_backward(runner: Runner) -> None:
    given = tensors(Problem())
    o, stats, largest, rng_state = forward(runner, Problem(), given, return_max_logit=True)
    scores = 0.3 * torch.einsum("bihd,bjhd->bhij", given.packed[0].double(), given.packed[1].double())
    close(largest[..., 0], scores.amax(-1), torch.float32, 8, 8.0)
    with pytest.raises(ShapeError, match="Aux_CTX_Tensors .*: expected 2 tensors"):
        backward(runner, Problem(), given, o, o, [stats, largest, rng_state])


def test_dropout_is_drawn_per_call_from_the_generator_and_not_in_inference(runner: Runner) -> None:
    problem = Problem(dropout=0.5)
    given = tensors(problem)
    generator = torch.Generator().manual_seed(3)
    first, second = (forward(runner, problem, given, rng_gen=generator) for _ in range(2))
    assert not torch.equal(first[2], second[2]) and not torch.equal(first[0], second[0])
    again = forward(runner, problem, given, rng_gen=torch.Generator().manual_seed(3))
    assert torch.equal(first[0], again[0]) and torch.equal(first[2], again[2])
    torch.manual_seed(1)
    default = forward(runner, problem, given)
    torch.manual_seed(1)
    assert torch.equal(default[0], forward(runner, problem, given)[0])
    inference = forward(runner, problem, given, is_training=False)
    assert torch.equal(inference[0], forward(runner, Problem(), given)[0]) and torch.equal(inference[1], first[1])


REFUSED = [
    ({"qkv_layout": L.NVTE_Paged_KV_BSHD_BSHD_BSHD}, NotServedError, "page_table_k is None|BSHD is not served"),
    ({"page_table_k": torch.zeros(1, dtype=torch.int32)}, NotServedError, "page_table_k is given"),
    ({"qkv_layout": L.NVTE_QKV_Layout_NOT_SET}, NotServedError, "NOT_SET is not served"),
    ({"attn_mask_type": M.NVTE_PADDING_MASK}, ArgumentError, "cumulative lengths"),
    ({"Q": torch.zeros(2, 5, 3, 8)}, ShapeError, "Q of .*heads that are a multiple of the 4 of K"),
    ({"K": torch.zeros(2, 5, 4, 7)}, ShapeError, "K of .*the width of Q, 8"),
    ({"V": torch.zeros(2, 6, 4, 8)}, ShapeError, "V of .*the tokens and heads of K"),
    ({"Q": torch.zeros(5, 4, 8)}, ShapeError, r"Q .*: expected \[b, s, h, d\]"),
    ({"p_dropout": 1.0}, ArgumentError, "a probability"),
    ({"bias_type": B.NVTE_POST_SCALE_BIAS}, ShapeError, "a Bias tensor"),
    ({"softmax_type": S.NVTE_LEARNABLE_SOFTMAX}, ShapeError, "a SoftmaxOffset tensor"),
    ({"o_format": F.NVTE_THD}, ArgumentError, "a format that fits"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_what_is_not_served_or_does_not_fit_is_refused(runner: Runner, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        forward(runner, Problem(), tensors(Problem()), **changes)


QUERY = {
    "is_training": True,
    "q_dtype": 6,
    "kv_dtype": 6,
    "qkv_layout": L.NVTE_BSHD_BSHD_BSHD,
    "bias_type": B.NVTE_NO_BIAS,
    "attn_mask_type": M.NVTE_CAUSAL_MASK,
    "softmax_type": S.NVTE_VANILLA_SOFTMAX,
    "p_dropout": 0.0,
    "num_attn_heads": 4,
    "num_gqa_groups": 4,
    "max_seqlen_q": 8,
    "max_seqlen_kv": 8,
    "head_dim_qk": 8,
    "head_dim_v": 8,
    "window_size_left": -1,
    "window_size_right": -1,
    "return_max_logit": False,
    "cuda_graph": False,
    "deterministic": True,
}


REFUSED_QUERIES: list[dict[str, Any]] = [
    {"q_dtype": 7},
    {"q_dtype": 2, "kv_dtype": 2},
    {"num_gqa_groups": 3},
    {"p_dropout": 1.0},
    {"qkv_layout": L.NVTE_BS3HD, "head_dim_v": 4},
    {"qkv_layout": L.NVTE_Paged_KV_THD_BSHD_BSHD},
    {"qkv_layout": L.NVTE_THD_THD_THD, "cuda_graph": True},
]


def test_the_support_query_answers_in_both_forms(runner: Runner) -> None:
    served, none = NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, NVTE_Fused_Attn_Backend.NVTE_No_Backend
    assert runner("get_fused_attn_backend", **QUERY) == served
    assert runner("get_fused_attn_backend", **{**QUERY, "q_dtype": 7, "kv_dtype": 7}) == NVTE_Fused_Attn_Backend.NVTE_FP8
    for changes in REFUSED_QUERIES:
        assert runner("get_fused_attn_backend", **{**QUERY, **changes}) == none == -1, changes
    params = {"qkv_layout": L.NVTE_BSHD_BSHD_BSHD, "bias_type": B.NVTE_ALIBI, "qkv_dtype": 6}
    assert runner("get_fused_attn_backend", fused_attn_params=SimpleNamespace(**params)) == (served, "")
    fp8 = {**params, "qkv_dtype": 8, "scaling_mode": NVTEScalingMode.NVTE_DELAYED_TENSOR_SCALING}
    assert runner("get_fused_attn_backend", fused_attn_params=SimpleNamespace(**fp8)) == (NVTE_Fused_Attn_Backend.NVTE_FP8, "")
    refused = [(params, {"qkv_dtype": 2}, "int32"), (fp8, {"scaling_mode": NVTEScalingMode.NVTE_NVFP4_1D_SCALING}, "NVFP4")]
    refused += [(params, {"dropout": 1.5}, "dropout"), (params, {"qkv_layout": L.NVTE_QKV_Layout_NOT_SET}, "NOT_SET")]
    for base, changes, word in refused:
        backend, reason = runner("get_fused_attn_backend", fused_attn_params=SimpleNamespace(**{**base, **changes}))
        assert backend == none and word in reason
    with pytest.raises(TypeError, match="19 arguments"):
        runner("get_fused_attn_backend", is_training=True)


def test_different_sequence_counts_are_refused(runner: Runner) -> None:
    problem = PROBLEMS["thd"]
    with pytest.raises(ArgumentError, match="equally many sequences"):
        forward(runner, problem, tensors(problem), cu_seqlens_q=cumulative((5, 9)))
