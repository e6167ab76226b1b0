"""Tokens to their experts and back, copy by copy: places exactly, sums in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tex_backends import REFERENCE, Runner, on_backends
from torch import Tensor

from fusible.conformance.table import FLOATS, close
from fusible.errors import ArgumentError, DTypeError
from fusible.tex import DType

MOVERS = on_backends("moe_permute_fwd", "moe_permute_bwd", "moe_unpermute_fwd", "moe_unpermute_bwd")
TYPES = pytest.mark.parametrize("dtype", FLOATS)
TOKENS, COPIES, HIDDEN = 9, 3, 16
NONE = torch.empty(0)
CODES = {torch.float32: DType.kFloat32, torch.bfloat16: DType.kBFloat16, torch.float16: DType.kFloat16}


def experts(seed: int = 1) -> Tensor:
    return torch.randint(0, 4, (TOKENS, COPIES), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def places(indices: Tensor, rows: int) -> tuple[list[int], list[tuple[int, int]]]:
    """The row_id_map, and the (token, copy) that each row holds, by Python's stable sort."""
    pairs = sorted(((t, k) for t in range(len(indices)) for k in range(indices.shape[1])), key=lambda pair: indices[pair].item())
    at = {pair: place for place, pair in enumerate(pairs)}
    found = [at[t, k] for k in range(indices.shape[1]) for t in range(len(indices))]
    return [place if place < rows else -1 for place in found], pairs[:rows]


def permute(runner: Runner, x: Tensor, indices: Tensor, rows: int = 0, dtype: Any = None) -> tuple[Tensor, Tensor]:
    moved, row_id_map, _ = runner(
        "moe_permute_fwd",
        input=x,
        dtype=dtype if dtype is not None else CODES[x.dtype],
        indices=indices,
        num_out_tokens=rows,
        workspace=[],
        max_expanded_token_num=indices.numel(),
    )
    return moved, row_id_map


@MOVERS
@TYPES
@pytest.mark.parametrize("rows", [-1, 0, TOKENS * COPIES, 20, 1])
def test_copies_go_to_their_experts_in_order_and_the_rest_is_dropped(runner: Runner, dtype: torch.dtype, rows: int) -> None:
    x, indices = values((TOKENS, HIDDEN), dtype), experts()
    kept = rows if rows > 0 else TOKENS * COPIES
    expected, pairs = places(indices, kept)
    moved, row_id_map = permute(runner, x, indices, rows)
    assert row_id_map.dtype is torch.int32 and row_id_map.tolist() == expected
    assert torch.equal(moved, x[[t for t, _ in pairs]])
    same = permute(runner, x, indices.long(), rows)
    assert torch.equal(same[0], moved) and torch.equal(same[1], row_id_map)


@MOVERS
def test_rows_beyond_the_copies_are_zero(runner: Runner) -> None:
    x, indices = values((2, 4), torch.float32), torch.tensor([[1], [0]], dtype=torch.int32)
    moved, row_id_map = permute(runner, x, indices, 5)
    assert torch.equal(moved, torch.cat((x.flip(0), torch.zeros(3, 4)))) and row_id_map.tolist() == [1, 0]


@MOVERS
def test_the_workspace_is_four_tensors_and_comes_back(runner: Runner) -> None:
    call = {"input": torch.ones(2, 4), "dtype": 4, "indices": torch.zeros(2, 1, dtype=torch.int32), "num_out_tokens": 0, "max_expanded_token_num": 2}
    workspace = runner("moe_permute_fwd", **call, workspace=[])[2]
    assert len(workspace) == 4
    again = runner("moe_permute_fwd", **call, workspace=workspace)[2]
    assert all(a is b for a, b in zip(again, workspace, strict=True))


def summed(x: Tensor, row_id_map: Tensor, prob: Tensor | None) -> Tensor:
    """``sum_k prob[t, k] x[row]`` in float64, one copy at a time."""
    out = torch.zeros(TOKENS, x.shape[1], dtype=torch.float64)
    for place, row in enumerate(row_id_map.tolist()):
        k, t = divmod(place, TOKENS)
        if row >= 0:
            out[t] += x[row].double() * (prob[t, k].double() if prob is not None else 1.0)
    return out


@MOVERS
@TYPES
@pytest.mark.parametrize("rows", [0, 20])
@pytest.mark.parametrize("weighted", [False, True])
def test_copies_come_back_summed_by_their_weights(runner: Runner, dtype: torch.dtype, rows: int, weighted: bool) -> None:
    moved, row_id_map = permute(REFERENCE, values((TOKENS, HIDDEN), dtype), experts(), rows)
    prob = torch.rand(TOKENS, COPIES, generator=torch.Generator().manual_seed(3)) if weighted else None
    expected = summed(moved, row_id_map, prob)
    call = {"input": moved, "dtype": CODES[dtype], "row_id_map": row_id_map, "num_tokens": TOKENS, "topK": COPIES}
    for function in ("moe_unpermute_fwd", *(() if weighted else ("moe_permute_bwd",))):
        got = runner(function, **call, prob=prob if prob is not None else NONE)
        assert got.dtype is dtype
        close(got, expected, dtype, COPIES, 3 * moved.abs().max().item())


@MOVERS
def test_a_dropped_copy_takes_nothing_from_any_row(runner: Runner) -> None:
    moved = torch.full((2, 4), math.nan)
    moved[1] = 3.0
    row_id_map = torch.tensor([1, -1, -1, -1], dtype=torch.int32)
    got = runner("moe_unpermute_fwd", input=moved, dtype=4, row_id_map=row_id_map, prob=torch.ones(2, 2), num_tokens=2, topK=2)
    assert got.tolist() == [[3.0] * 4, [0.0] * 4]
    act_grad, prob_grad = runner(
        "moe_unpermute_bwd", input_bwd=torch.ones(2, 4), input_fwd=moved, dtype=4, row_id_map=row_id_map, prob=torch.full((2, 2), 0.5)
    )
    assert act_grad.tolist() == [[0.0] * 4, [0.5] * 4] and prob_grad.tolist() == [[12.0, 0.0], [0.0, 0.0]]


@MOVERS
@TYPES
@pytest.mark.parametrize("rows", [0, 20])
def test_the_gradients_are_those_of_autograd(runner: Runner, dtype: torch.dtype, rows: int) -> None:
    moved, row_id_map = permute(REFERENCE, values((TOKENS, HIDDEN), dtype), experts(), rows)
    prob = torch.rand(TOKENS, COPIES, generator=torch.Generator().manual_seed(3))
    g = values((TOKENS, HIDDEN), dtype, 5)
    point, weights = moved.double().requires_grad_(), prob.double().requires_grad_()
    with torch.enable_grad():
        out = torch.stack(
            [
                sum((point[row] * weights[t, k] for k in range(COPIES) if (row := row_id_map[k * TOKENS + t].item()) >= 0), point.new_zeros(HIDDEN))
                for t in range(TOKENS)
            ]
        )
    of_act, of_prob = torch.autograd.grad(out, (point, weights), g.double())
    act_grad, prob_grad = runner("moe_unpermute_bwd", input_bwd=g, input_fwd=moved, dtype=CODES[dtype], row_id_map=row_id_map, prob=prob)
    assert act_grad.dtype is dtype and prob_grad.dtype is torch.float32
    close(act_grad, of_act, dtype)
    close(prob_grad, of_prob, torch.float32, HIDDEN, (g.abs().max() * moved.abs().max()).item() * HIDDEN)


@MOVERS
def test_without_weights_the_gradient_goes_to_the_row_as_it_is(runner: Runner) -> None:
    g, row_id_map = values((3, 4), torch.bfloat16), torch.tensor([2, -1, 0], dtype=torch.int32)
    act_grad, prob_grad = runner("moe_unpermute_bwd", input_bwd=g, input_fwd=torch.zeros(4, 4), dtype=6, row_id_map=row_id_map, prob=NONE)
    assert torch.equal(act_grad, torch.stack((g[2], torch.zeros_like(g[0]), g[0], torch.zeros_like(g[0]))))
    assert torch.equal(prob_grad, torch.zeros(3, 1))


@MOVERS
@pytest.mark.parametrize(("code", "fp8"), [(DType.kFloat8E4M3, torch.float8_e4m3fn), (DType.kFloat8E5M2, torch.float8_e5m2)])
def test_fp8_moves_as_bytes_and_comes_back_averaged_or_weighted(runner: Runner, code: DType, fp8: torch.dtype) -> None:
    x = values((TOKENS, HIDDEN), torch.float32).to(fp8)
    moved, row_id_map = permute(runner, x.view(torch.uint8), experts(), 20, code)
    assert moved.dtype is torch.uint8
    exact = permute(runner, x.float(), experts(), 20)[0]
    assert torch.equal(moved.view(fp8).float(), exact)
    prob = torch.rand(TOKENS, COPIES, generator=torch.Generator().manual_seed(3))
    call = {"dtype": code, "row_id_map": row_id_map, "num_tokens": TOKENS, "topK": COPIES}
    for weights, divisor in ((NONE, COPIES), (prob, 1)):
        got = runner("moe_unpermute_fwd", input=moved, **call, prob=weights)
        # fp32 sums of three fp8 values: the one rounding to fp8 is the whole difference.
        expected = summed(exact, row_id_map, weights if weights.numel() else None) / divisor
        step = torch.finfo(fp8).eps / 2 * expected.abs() + torch.finfo(fp8).smallest_normal * torch.finfo(fp8).eps / 2
        assert got.dtype is torch.uint8 and ((got.view(fp8).double() - expected).abs() <= step * (1 + 1e-5)).all()


@MOVERS
def test_no_tokens_and_nothing_kept(runner: Runner) -> None:
    moved, row_id_map = permute(runner, torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int32))
    assert list(moved.shape) == [0, 4] and list(row_id_map.shape) == [0]
    dropped = torch.full((4,), -1, dtype=torch.int32)
    back = runner("moe_unpermute_fwd", input=torch.zeros(0, 4), dtype=4, row_id_map=dropped, prob=NONE, num_tokens=2, topK=2)
    assert torch.equal(back, torch.zeros(2, 4))
    call = {"dtype": 4, "row_id_map": dropped[:0]}
    for prob in (NONE, torch.zeros(0, 2)):
        act_grad, _ = runner("moe_unpermute_bwd", input_bwd=torch.zeros(0, 4), input_fwd=torch.ones(3, 4), prob=prob, **call)
        assert torch.equal(act_grad, torch.zeros(3, 4))


@MOVERS
def test_what_does_not_fit_is_refused(runner: Runner) -> None:
    x, indices = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int32)
    for bad, where, kind in (
        (torch.zeros(3, 4, 1), indices, ArgumentError),
        (x, torch.zeros(2, 2, dtype=torch.int32), ArgumentError),
        (x, torch.zeros(3, 2), DTypeError),
        (x.double(), indices, DTypeError),
        (x.to(torch.uint8), indices, DTypeError),
    ):
        with pytest.raises(kind, match=": expected .*; "):
            permute(runner, bad, where, dtype=DType.kFloat32)
    row_id_map = torch.zeros(6, dtype=torch.int32)
    back = {"input": torch.zeros(6, 4), "dtype": 4, "row_id_map": row_id_map, "prob": NONE, "num_tokens": 3, "topK": 2}
    for name, value, kind in (
        ("row_id_map", row_id_map[:5], ArgumentError),
        ("row_id_map", row_id_map.float(), DTypeError),
        ("prob", torch.zeros(2, 3), ArgumentError),
        ("num_tokens", 4, ArgumentError),
    ):
        with pytest.raises(kind, match=": expected .*; "):
            runner("moe_unpermute_fwd", **{**back, name: value})
    with pytest.raises(ArgumentError):
        runner("moe_unpermute_bwd", input_bwd=torch.zeros(3, 5), input_fwd=torch.zeros(6, 4), dtype=4, row_id_map=row_id_map, prob=torch.zeros(3, 2))
