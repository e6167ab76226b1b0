"""Sequences divided between ranks, against loops over sequences and tokens.

Moves are exact. What is computed has the bound of ``tex_op_table``: one rounding at the store, and fp32 before it.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tex_backends import Runner, on_backends
from torch import Tensor

from fusible import tex
from fusible.conformance.table import close
from fusible.errors import ArgumentError, DTypeError, ShapeError

LENGTHS = (4, 0, 6, 2)
CU = torch.tensor([0, 4, 4, 10, 12], dtype=torch.int32)
TOKENS, HEADS, WIDTH = 14, 3, 4
"""Two tokens are of no sequence."""
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def spans() -> list[tuple[int, int]]:
    return [(int(CU[i]), n) for i, n in enumerate(LENGTHS)]


def halves(which: int) -> Tensor:
    """The tokens of all first (0) or second (1) halves."""
    return torch.cat([torch.arange(start + which * n // 2, start + (which + 1) * n // 2) for start, n in spans()])


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


READ = on_backends("thd_read_half_tensor")


@READ
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("half", [0, 1])
def test_a_half_of_every_sequence_is_read(runner: Runner, half: int, dtype: torch.dtype) -> None:
    x = (torch.arange(TOKENS * 2 * 3) + 1).view(TOKENS, 2, 3).to(dtype)
    got = runner("thd_read_half_tensor", tensor=x, cu_seqlens=CU, half_idx=half)
    assert got.dtype is dtype and torch.equal(got, torch.cat((x[halves(half)], torch.zeros(1, 2, 3, dtype=dtype))))
    both = torch.stack((x, x + 1))
    assert torch.equal(runner("thd_read_half_tensor", tensor=both, cu_seqlens=CU, half_idx=half)[1, :6], (x + 1)[halves(half)])


@READ
def test_no_half_and_no_middle_are_refused(runner: Runner) -> None:
    with pytest.raises(ArgumentError, match="0 or 1"):
        runner("thd_read_half_tensor", tensor=torch.zeros(14, 1, 1), cu_seqlens=CU, half_idx=2)
    with pytest.raises(ShapeError, match="an even number"):
        runner("thd_read_half_tensor", tensor=torch.zeros(13, 1, 1), cu_seqlens=CU, half_idx=0)


def unpacked(lse: Tensor, length: int) -> Tensor:
    """``[h, t] -> [b, h, length]``, the rest 7."""
    rows = torch.full((len(LENGTHS), HEADS, length), 7.0, dtype=lse.dtype)
    for i, (start, n) in enumerate(spans()):
        rows[i, :, :n] = lse[:, start : start + n]
    return rows


def step_of_halves(step: Tensor, packed: bool) -> Tensor:
    """``[h, 6]`` of second halves as the functions take it, longer than needed."""
    if packed:
        return torch.cat((step, torch.full((HEADS, 2), 5.0, dtype=step.dtype)), 1)
    rows, at = torch.full((len(LENGTHS), HEADS, 4), 5.0, dtype=step.dtype), 0
    for i, n in enumerate(LENGTHS):
        rows[i, :, : n // 2] = step[:, at : at + n // 2]
        at += n // 2
    return rows


@on_backends("thd_second_half_lse_correction", "thd_read_second_half_lse")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("packed", [True, False])
def test_second_halves_of_the_logsumexp_are_merged_and_read(runner: Runner, packed: bool, dtype: torch.dtype) -> None:
    lse, step = draw(HEADS, TOKENS, dtype=dtype), draw(HEADS, 6, seed=1)
    step[0, 1] = lse[0, halves(1)[1]] = -torch.inf
    lse[1, halves(1)[2]] = -torch.inf
    expected = lse.double().clone()
    expected[:, halves(1)] = torch.logaddexp(expected[:, halves(1)], step.double())
    given = lse if packed else unpacked(lse, 8)
    given = given.clone()
    runner("thd_second_half_lse_correction", lse=given, lse_per_step=step_of_halves(step, packed), cu_seqlens=CU, lse_packed=packed)
    close(given, expected if packed else unpacked(expected, 8), torch.float32, 1, 8.0)
    untouched = halves(0) if packed else slice(0, 2)
    former = lse[:, untouched] if packed else unpacked(lse, 8)[2:3, :, untouched]
    assert torch.equal(given[:, untouched] if packed else given[2:3, :, untouched], former)

    got = runner("thd_read_second_half_lse", lse=given, cu_seqlens=CU, lse_packed=packed, second_half_lse_seqlen=8 if packed else 4)
    read = step_of_halves(expected[:, halves(1)].float(), packed)
    read[read == 5.0] = 0.0
    assert got.dtype is torch.float32 and got.shape == read.shape
    close(got, read.double(), torch.float32, 1, 8.0)


OUT = on_backends("thd_out_correction")


@OUT
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("rescaled", [False, True])
def test_outputs_are_merged_in_both_forms(runner: Runner, rescaled: bool, second: bool, packed: bool, dtype: torch.dtype) -> None:
    tokens = halves(1) if second else torch.arange(12)
    out, step = draw(TOKENS, HEADS, WIDTH, dtype=dtype), draw(7 if second else TOKENS, HEADS, WIDTH, seed=1, dtype=dtype)
    old, step_lse = draw(HEADS, TOKENS, seed=2), draw(HEADS, len(tokens), seed=3)
    old[0, tokens[3]] = -torch.inf
    old[1, tokens[4]] = step_lse[1, 4] = -torch.inf
    lse = old.clone()
    lse[:, tokens] = torch.logaddexp(old[:, tokens], step_lse)
    expected = out.double()
    kept = torch.exp(old.double() - lse.double())[:, tokens].nan_to_num(0).t()[..., None] if rescaled else 1.0
    gained = torch.exp(step_lse.double() - lse.double()[:, tokens]).nan_to_num(0).t()[..., None]
    expected[tokens] = expected[tokens] * kept + step[: len(tokens)].double() * gained
    if packed:
        sides = {"lse": lse, "lse_per_step": step_lse}
    else:
        sides = {"lse": unpacked(lse, 8), "lse_per_step": step_of_halves(step_lse, False) if second else unpacked(step_lse, 9)}
    if rescaled:
        sides = {"old_lse": old if packed else unpacked(old, 8), **sides}
    runner("thd_out_correction", out=out, out_per_step=step, **sides, cu_seqlens=CU, only_second_half=second, lse_packed=packed)
    close(out, expected, dtype, 2, 8.0)


@OUT
def test_the_forms_of_the_correction_are_told_apart_by_their_number(runner: Runner) -> None:
    lse = torch.zeros(HEADS, TOKENS)
    results = []
    for leading in ((lse + 1, lse), (lse,)):
        out = torch.ones(TOKENS, HEADS, WIDTH)
        with tex.set_backend(runner.backend, strict=True):
            tex.thd_out_correction(out, torch.ones(7, HEADS, WIDTH), *leading, lse - 1, CU, True, True)
        results.append(out)
    share = torch.exp(torch.tensor(-1.0))
    assert torch.allclose(results[0][halves(1)], 1 / share + share) and torch.allclose(results[1][halves(1)], 1 + share)
    assert all((out[halves(0)] == 1).all() for out in results)
    with pytest.raises(TypeError):
        tex.thd_out_correction(results[0], results[1], lse, CU, True)


@OUT
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"out_per_step": torch.zeros(14, HEADS, WIDTH, dtype=torch.bfloat16)}, DTypeError, "out_per_step .*: expected .*float32"),
        ({"out_per_step": torch.zeros(6, HEADS, WIDTH)}, ShapeError, r"\[14, h, d\]"),
        ({"lse": torch.zeros(2, TOKENS)}, ShapeError, "lse of thd_out_correction: expected .*"),
        ({"lse_per_step": torch.zeros(HEADS, 4, TOKENS)}, ShapeError, "lse_per_step.*: expected"),
    ],
)
def test_a_correction_that_does_not_fit_writes_nothing(runner: Runner, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    out = torch.ones(TOKENS, HEADS, WIDTH)
    sides = {"lse": torch.zeros(HEADS, TOKENS), "lse_per_step": torch.zeros(HEADS, TOKENS)}
    arguments = {"out_per_step": out.clone(), **sides, "cu_seqlens": CU, "only_second_half": False, "lse_packed": True, **changes}
    with pytest.raises(error, match=message):
        runner("thd_out_correction", out=out, **arguments)
    assert (out == 1).all()


GRAD = on_backends("thd_grad_correction")
WORDS = ["add", "copy", "zero", "none"]


@GRAD
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("first", WORDS)
@pytest.mark.parametrize("second", WORDS)
def test_each_half_of_a_gradient_is_corrected_by_its_word(runner: Runner, first: str, second: str, dtype: torch.dtype) -> None:
    for compact in (True, False):
        if (compact and not {"zero", "none"} & {first, second}) or (not compact and "none" in (first, second)):
            continue
        grad, step = draw(TOKENS, 2, 3, dtype=dtype), draw(7 if compact else TOKENS, 2, 3, seed=1, dtype=dtype)
        expected = grad.clone()
        for half, word in enumerate((first, second)):
            tokens = halves(half)
            value = step[:6] if compact else step[tokens]
            new = {"add": (grad[tokens].float() + value.float()).to(dtype), "copy": value, "zero": 0.0, "none": grad[tokens]}[word]
            expected[tokens] = new
        runner("thd_grad_correction", grad=grad, grad_per_step=step, cu_seqlens=CU, first_half=first, second_half=second)
        assert torch.equal(grad, expected)


@GRAD
def test_bytes_are_copied_and_zeroed_and_other_words_refused(runner: Runner) -> None:
    grad, step = torch.full((TOKENS, 1, 1), 9, dtype=torch.uint8), torch.arange(1, 8, dtype=torch.uint8).view(7, 1, 1)
    runner("thd_grad_correction", grad=grad, grad_per_step=step, cu_seqlens=CU, first_half="zero", second_half="copy")
    expected = torch.full_like(grad, 9)
    expected[halves(0)], expected[halves(1)] = 0, step[:6]
    assert torch.equal(grad, expected)
    with pytest.raises(ArgumentError, match="one of add, copy"):
        runner("thd_grad_correction", grad=grad, grad_per_step=step, cu_seqlens=CU, first_half="sub", second_half="copy")
    with pytest.raises(ShapeError, match="of grad_per_step"):
        runner("thd_grad_correction", grad=grad, grad_per_step=step, cu_seqlens=CU, first_half="add", second_half="copy")
    assert torch.equal(grad, expected)


def owned(cu: list[int], world: int, rank: int) -> list[int]:
    """The tokens of a rank: chunk ``rank`` and its mirror image of every sequence."""
    found = []
    for start, end in itertools.pairwise(cu):
        size = (end - start) // (2 * world)
        for chunk in (rank, 2 * world - 1 - rank):
            found += range(start + chunk * size, start + (chunk + 1) * size)
    return found


@on_backends("thd_get_partitioned_indices", "thd_sequence_order_to_cp_rank_order", "thd_cp_rank_order_to_sequence_order")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("world", "bounds", "tail"), [(1, [0, 2, 6], 0), (2, [0, 8, 8, 12, 24], 0), (4, [0, 8, 16, 24, 40], 8)])
def test_ranks_own_a_chunk_and_its_mirror_image(runner: Runner, world: int, bounds: list[int], tail: int, dtype: torch.dtype) -> None:
    cu, total = torch.tensor(bounds, dtype=torch.int32), bounds[-1] + tail
    expected = [owned([*bounds, total], world, rank) for rank in range(world)]
    for rank in range(world):
        got = runner("thd_get_partitioned_indices", cu_seqlens=cu, total_tokens=total, world_size=world, rank=rank)
        assert got.dtype is torch.int32 and got.tolist() == expected[rank]
    x = torch.arange(total * 2).view(total, 2).to(dtype)
    order = {"cu_seqlens": cu, "cp_size": world, "total_tokens": total}
    ranked = runner("thd_sequence_order_to_cp_rank_order", inp=x, **order)
    assert torch.equal(ranked, x[[place for places in expected for place in places]])
    assert torch.equal(runner("thd_cp_rank_order_to_sequence_order", inp=ranked, **order), x)
    with pytest.raises(ShapeError, match="all tokens"):
        runner("thd_sequence_order_to_cp_rank_order", inp=x, **{**order, "total_tokens": total + world})
    with pytest.raises(ArgumentError, match="a rank of the group"):
        runner("thd_get_partitioned_indices", cu_seqlens=cu, total_tokens=total, world_size=world, rank=world)


COPY = on_backends("thd_copy_valid_tokens_from_per_split_to_rank_local")


@COPY
@pytest.mark.parametrize(
    ("padded", "lengths"),
    [([0, 4, 4, 10, 12], (3, 0, 6, 1)), ([2, 4, 7, 11, 12], (2, 0, 3, 0)), ([0, 0, 0, 9, 12], (0, 0, 5, 3)), ([0, 6, 12, 12, 12], (6, 2, 0, 0))],
)
def test_valid_tokens_alone_are_copied(runner: Runner, padded: list[int], lengths: tuple[int, ...]) -> None:
    out, inp = draw(12, 2, 3, dtype=torch.bfloat16), draw(12, 2, 3, seed=1, dtype=torch.bfloat16)
    expected = out.clone()
    for start, n in zip(padded, lengths, strict=False):
        expected[start : start + n] = inp[start : start + n]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    starts = torch.tensor(padded, dtype=torch.int32)
    runner("thd_copy_valid_tokens_from_per_split_to_rank_local", out=out, inp=inp, cu_seqlens_padded=starts, cu_seqlens=cu)
    assert torch.equal(out, expected)
    for wrong, error in ((inp[:-1], ShapeError), (inp.float(), DTypeError)):
        with pytest.raises(error):
            runner("thd_copy_valid_tokens_from_per_split_to_rank_local", out=out, inp=wrong, cu_seqlens_padded=starts, cu_seqlens=cu)


@on_backends("thd_out_correction", "thd_second_half_lse_correction")
@pytest.mark.parametrize("packed", [True, False])
def test_lengths_without_a_sequence_leave_every_token_alone(runner: Runner, packed: bool) -> None:
    none = torch.zeros(1, dtype=torch.int32)
    out, lse = torch.randn(4, 2, 8), torch.randn(2, 4) if packed else torch.zeros(0, 2, 4)
    was = out.clone()
    arguments = {"out_per_step": torch.randn(4, 2, 8), "lse": lse, "lse_per_step": lse.clone(), "cu_seqlens": none, "lse_packed": packed}
    runner("thd_out_correction", out=out, only_second_half=False, **arguments)
    assert torch.equal(out, was)
    for wrong in (none[:0], none[0], none[None]):
        with pytest.raises(ShapeError, match=r"cu_seqlens of thd_out_correction"):
            runner("thd_out_correction", out=out, only_second_half=False, **{**arguments, "cu_seqlens": wrong})
    merged = lse.clone()
    runner("thd_second_half_lse_correction", lse=merged, lse_per_step=lse.clone(), cu_seqlens=none, lse_packed=packed)
    assert torch.equal(merged, lse) and torch.equal(out, was)
