"""FP8 attention: the bytes of its results, and the amaxes that it records, against attention on the values that the FP8 tensors stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tex_attention import B, L, M, Problem, S, Tensors, backward, cumulative, forward, tensors
from tex_backends import REFERENCE, Runner, on_backends
from torch import Tensor

from fusible import tex
from fusible.conformance.table import close
from fusible.errors import ShapeError
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer
from fusible.tex import DType

pytestmark = on_backends("fused_attn_fwd", "fused_attn_bwd")

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
PROBLEMS = {
    "bf16": Problem(dtype=torch.bfloat16, groups=2, mask=M.NVTE_CAUSAL_MASK),
    "fp16 thd": Problem(dtype=torch.float16, layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_MASK, lengths_q=(5, 2), lengths_kv=(6, 3)),
    "bf16 dropout": Problem(dtype=torch.bfloat16, dropout=0.3, layout=L.NVTE_SBHD_SBHD_SBHD, softmax=S.NVTE_LEARNABLE_SOFTMAX),
    "bf16 alibi": Problem(dtype=torch.bfloat16, bias_type=B.NVTE_ALIBI, window=(2, 1)),
}


def delayed(scale: float, fp8: DType = E4M3, amax: float = 0.0) -> Float8Quantizer:
    return Float8Quantizer(torch.tensor([scale]), torch.tensor([amax]), fp8, columnwise=False)


def quantized(x: Tensor, scale: float = 8.0, fp8: DType = E4M3) -> Any:
    return REFERENCE("quantize", tensor=x, quantizer=delayed(scale, fp8))


def values(x: Any) -> Tensor:
    return REFERENCE("dequantize", input=x, otype=DType.kFloat32)


def pair(problem: Problem) -> tuple[Tensors, Tensors, Problem]:
    """The FP8 operands; the fp32 ones that they stand for; and the problem of these."""
    given = tensors(problem)
    fp8 = tuple(quantized(x) for x in given.packed)
    plain = tuple(values(x) for x in fp8)
    return replace(given, packed=fp8), replace(given, packed=plain), replace(problem, dtype=torch.float32)


def drawn(problem: Problem) -> dict[str, Any]:
    return {"rng_gen": torch.Generator().manual_seed(5)} if problem.dropout else {}


@pytest.mark.parametrize("name", PROBLEMS)
def test_delayed_scaling_quantizes_what_fp32_attention_gives(runner: Runner, name: str) -> None:
    problem = PROBLEMS[name]
    fp8, plain, exact = pair(problem)
    s, o_quantizer = delayed(1.0), delayed(16.0, amax=0.01)
    o, *aux = forward(runner, problem, fp8, s_quantizer=s, o_quantizer=o_quantizer, fake_dtype=problem.dtype, **drawn(problem))
    expected, *plain_aux = forward(REFERENCE, exact, plain, **drawn(problem))
    assert o._dtype is problem.dtype and o._quantizer is o_quantizer
    assert torch.equal(o._data, quantized(expected, 16.0)._data) and torch.equal(o_quantizer.amax, expected.abs().amax().view(1))
    assert all(torch.equal(a, b) for a, b in zip(aux, plain_aux, strict=True))
    assert 0 < s.amax.item() <= 1 / (1 - problem.dropout)

    do = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    do_fp8 = quantized(do, 4.0, E5M2)
    dp, dqkv = delayed(1.0, E5M2), delayed(32.0, E5M2)
    given = {"s_quantizer": s, "dp_quantizer": dp, "dqkv_quantizer": dqkv, "fake_dtype": problem.dtype}
    got = backward(runner, problem, fp8, o, do_fp8, aux, **given)
    wanted = backward(REFERENCE, exact, plain, values(o), values(do_fp8), plain_aux)
    for mine, theirs in zip(got[:3], wanted[:3], strict=True):
        assert mine._dtype is problem.dtype and torch.equal(mine._data, quantized(theirs, 32.0, E5M2)._data)
    assert torch.equal(dqkv.amax, torch.stack([x.abs().amax() for x in wanted[:3]]).amax().view(1)) and dp.amax.item() > 0
    assert got[3] is None and (got[4] is None) == (wanted[4] is None)
    assert got[4] is None or torch.equal(got[4], wanted[4])


def test_amaxes_are_of_the_probabilities_and_of_the_gradients_of_the_scores(runner: Runner) -> None:
    problem = Problem(dtype=torch.bfloat16, lengths_q=(20, 20), lengths_kv=(20, 20), width=4, width_v=4)
    fp8, plain, _ = pair(problem)
    s, dp = delayed(1.0, amax=1e-3), delayed(1.0, E5M2, amax=1e-6)
    o, stats, rng_state = forward(runner, problem, fp8, s_quantizer=s, o_quantizer=delayed(16.0))
    do = torch.ones(o.shape)
    backward(runner, problem, fp8, o, do, [stats, rng_state], s_quantizer=s, dp_quantizer=dp, dqkv_quantizer=delayed(1.0, E5M2))
    p_most, ds_most = [], []
    for i in range(2):
        q, k, v = (x[i].double() for x in plain.packed)
        p = torch.softmax(problem.scale * torch.einsum("ihd,jhd->hij", q, k), -1)
        grad = torch.einsum("ihd,jhd->hij", do[i].double(), v) - (do[i].double() * values(o)[i].double()).sum(-1).t()[..., None]
        p_most.append(p.amax())
        ds_most.append((p * grad).abs().amax())
    close(s.amax, torch.stack(p_most).amax()[None], torch.float32, 24, 8.0)
    close(dp.amax, torch.stack(ds_most).amax()[None], torch.float32, 24, 8.0)
    large = delayed(1.0, amax=2.0)
    forward(runner, problem, fp8, s_quantizer=large, o_quantizer=delayed(16.0))
    assert large.amax.item() == 2.0


@pytest.mark.parametrize("is_training", [True, False])
def test_current_scaling_leaves_results_in_high_precision(runner: Runner, is_training: bool) -> None:
    problem = PROBLEMS["bf16"]
    fp8, plain, exact = pair(problem)
    quantizer = Float8CurrentScalingQuantizer(E4M3, "cpu")
    o, *aux = forward(runner, problem, fp8, s_quantizer=delayed(1.0), o_quantizer=quantizer, fake_dtype=torch.bfloat16, is_training=is_training)
    expected, *plain_aux = forward(REFERENCE, exact, plain, is_training=is_training)
    assert type(o) is Tensor and torch.equal(o, expected.bfloat16())
    do = quantized(torch.randn(o.shape, generator=torch.Generator().manual_seed(3)), 4.0, E5M2)
    grads = backward(runner, problem, fp8, o, do, aux, dqkv_quantizer=Float8CurrentScalingQuantizer(E5M2, "cpu"), fake_dtype=torch.bfloat16)
    wanted = backward(REFERENCE, exact, plain, o.float(), values(do), plain_aux)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(grads[:3], wanted[:3], strict=True))


@pytest.mark.parametrize(("layout", "count", "at"), [(L.NVTE_BS3HD, 3, 2), (L.NVTE_SBH3D, 3, 3), (L.NVTE_BSHD_BS2HD, 2, 2), (L.NVTE_T3HD, 3, 1)])
def test_bytes_of_packed_gradients_are_views_of_one_buffer(runner: Runner, layout: Any, count: int, at: int) -> None:
    name = layout.name.removeprefix("NVTE_").replace("3", "").replace("2", "").split("_")[-1]
    separate = L[f"NVTE_{name}_{name}_{name}"]
    mask = M.NVTE_PADDING_MASK if name == "THD" else M.NVTE_NO_MASK
    problem = Problem(dtype=torch.bfloat16, layout=separate, mask=mask, lengths_q=(3, 3), lengths_kv=(3, 3))
    fp8, _, _ = pair(problem)
    o, *aux = forward(runner, problem, fp8, s_quantizer=delayed(1.0), o_quantizer=delayed(16.0))
    do = quantized(torch.randn(o.shape, generator=torch.Generator().manual_seed(3)), 4.0, E5M2)
    results = [
        backward(runner, replace(problem, options={"dqkv_layout": to}), fp8, o, do, aux, dp_quantizer=delayed(1.0), dqkv_quantizer=delayed(8.0, E5M2))
        for to in (separate, layout)
    ]
    assert all(torch.equal(a._data, b._data) for a, b in zip(results[0][:3], results[1][:3], strict=True))
    parts = [x._data for x in results[1][3 - count : 3]]
    assert all(part.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr() for part in parts)
    step = torch.stack(parts, at).stride(at)
    assert [part.storage_offset() for part in parts] == [i * step for i in range(count)]


def test_a_call_that_fails_records_nothing(runner: Runner) -> None:
    problem = PROBLEMS["fp16 thd"]
    fp8, _, _ = pair(problem)
    quantizers = [delayed(1.0), delayed(16.0)]
    with pytest.raises(ShapeError, match="at most 9 tokens"):
        forward(runner, problem, fp8, s_quantizer=quantizers[0], o_quantizer=quantizers[1], cu_seqlens_kv=cumulative((6, 30)))
    assert all(quantizer.amax.item() == 0 for quantizer in quantizers)


@pytest.mark.parametrize("quantizer", ["s_quantizer", "o_quantizer"])
def test_other_quantizers_are_not_served(runner: Runner, quantizer: str) -> None:
    with tex.set_backend(runner.backend, strict=True):
        decision: Any = forward(tex.explain, Problem(), tensors(Problem()), **{quantizer: object()})  # pyright: ignore[reportArgumentType]
    assert decision.backend is None and (runner.backend != "torch" or quantizer in dict(decision.others)["torch"])
