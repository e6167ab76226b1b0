"""Functions that NVIDIA's Python package has Triton kernels for, as torch computes them on a CPU, against those kernels in Triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from te_client import package, relative_error

from fusible.errors import ShapeError

BF16 = torch.bfloat16
TOKENS, EXPERTS, HIDDEN = 10, 3, 8
ROUNDED = {torch.float32: 0.0, BF16: 2.0**-7}
"""By dtype: how far the interpreter's rounding to it is off, which truncates to bf16."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
PADDED = pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te:
        torch.manual_seed(0)
        yield te


def both(module: str, name: str, *arguments: Any) -> tuple[Any, Any]:
    """What a function gives as it is served, and what the package's own gives of copies of the arguments."""
    served = getattr(importlib.import_module(f"transformer_engine.pytorch.triton.{module}"), name)
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    return served(*arguments), served.__wrapped__(*copies)


def same(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if isinstance(one, torch.Tensor):
            assert one.dtype is other.dtype and one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        else:
            assert one == other


class Routed:
    """Tokens on their way to some experts, one of them to none."""

    def __init__(self, dtype: torch.dtype, padded: bool) -> None:
        self.mask = (torch.rand(TOKENS, EXPERTS) < 0.6).int()
        self.mask[4] = 0
        self.map = importlib.import_module("transformer_engine.pytorch.triton.permutation").make_row_id_map(self.mask, TOKENS, EXPERTS)
        counts = self.mask.sum(0)
        spare = -counts % 4
        self.pad = (spare.cumsum(0) - spare) if padded else None
        self.rows = int((counts + (spare if padded else 0)).sum())
        self.probs = torch.rand(TOKENS, EXPERTS) * self.mask
        self.probs[0] = 0.0
        self.x, self.permuted = torch.randn(TOKENS, HIDDEN).to(dtype), torch.randn(self.rows, HIDDEN).to(dtype)


@pytest.mark.usefixtures("te")
def test_the_map_of_rows() -> None:
    mask = Routed(BF16, False).mask
    found, expected = both("permutation", "make_row_id_map", mask, TOKENS, EXPERTS)
    assert found.dtype is torch.int32 and torch.equal(found[:, -1], mask.sum(1))
    for mine, theirs in zip(found.tolist(), expected.tolist(), strict=True):
        count = theirs[-1]
        assert mine[:count] == theirs[:count] and mine[EXPERTS : EXPERTS + count] == theirs[EXPERTS : EXPERTS + count]


@pytest.mark.usefixtures("te")
@DTYPES
@PADDED
@pytest.mark.parametrize("given", [(), ("probs",), ("probs", "scale")], ids=["alone", "probs", "probs and scale"])
def test_tokens_are_permuted(dtype: torch.dtype, padded: bool, given: tuple[str, ...]) -> None:
    of = Routed(dtype, padded)
    probs, scale = of.probs if "probs" in given else None, torch.randn(TOKENS, 2) if "scale" in given else None
    same(*both("permutation", "permute_with_mask_map", of.x, of.map, probs, scale, of.pad, TOKENS, EXPERTS, of.rows, HIDDEN, 2))


@pytest.mark.usefixtures("te")
@DTYPES
@PADDED
@pytest.mark.parametrize("merged", [False, True], ids=["summed", "merged"])
def test_tokens_are_put_back(dtype: torch.dtype, padded: bool, merged: bool) -> None:
    of = Routed(dtype, padded)
    merging, permuted = (of.probs, None) if merged else (None, torch.rand(of.rows))
    unpermute = importlib.import_module("transformer_engine.pytorch.triton.permutation").unpermute_with_mask_map
    same(*both("permutation", "unpermute_with_mask_map", of.permuted, of.map, merging, permuted, of.pad, TOKENS, EXPERTS, HIDDEN), ROUNDED[dtype])
    values = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for place in range(int(of.map[token, -1])):
            row, expert = int(of.map[token, place]), int(of.map[token, EXPERTS + place])
            row += 0 if of.pad is None else int(of.pad[expert])
            values[token] += of.permuted[row].double() * (of.probs[token, expert].double() if merged else 1.0)
    found, _ = unpermute(of.permuted, of.map, merging, permuted, of.pad, TOKENS, EXPERTS, HIDDEN)
    assert relative_error(found, values) <= (2.0**-9 if dtype is BF16 else EXPERTS * 2.0**-24)


@pytest.mark.usefixtures("te")
@DTYPES
@PADDED
def test_the_gradients_of_merging(dtype: torch.dtype, padded: bool) -> None:
    of = Routed(dtype, padded)
    arguments = of.x, of.map, of.permuted, of.probs, of.pad, TOKENS, EXPERTS, of.rows, HIDDEN
    same(*both("permutation", "unpermute_with_mask_map_bwd_with_merging_probs", *arguments), tolerance=max(HIDDEN * 2.0**-22, ROUNDED[dtype]))


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize("forward", [True, False])
def test_chunks_are_sorted(forward: bool) -> None:
    sizes, order = torch.tensor([3, 0, 2, 4]), torch.tensor([2, 0, 3, 1])
    found, expected = both("permutation", "make_chunk_sort_map", sizes, order, TOKENS, 4)
    same([found], [expected])
    arguments = torch.randn(TOKENS, HIDDEN), found, torch.rand(TOKENS), TOKENS, HIDDEN, forward
    same(*both("permutation", "sort_chunks_by_map", *arguments))


@pytest.mark.usefixtures("te")
def test_too_few_rows_are_refused() -> None:
    of = Routed(BF16, False)
    with pytest.raises(ShapeError, match=f"at least {of.rows} rows"):
        both("permutation", "permute_with_mask_map", of.x, of.map, None, None, None, TOKENS, EXPERTS, of.rows - 1, HIDDEN, 0)


@pytest.mark.usefixtures("te")
@DTYPES
@pytest.mark.parametrize("reduced", [False, True], ids=["each", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("overwrite", [False, True], ids=["copied", "overwritten"])
def test_cross_entropy_forward_and_backward(dtype: torch.dtype, reduced: bool, smoothing: float, overwrite: bool) -> None:
    """Targets of which one is ignored. exp and log of the two differ in the last places."""
    x, target = 3 * torch.randn(2, 5, 33).to(dtype), torch.randint(0, 33, (2, 5))
    target[1, 2] = -100
    found, expected = both("cross_entropy", "cross_entropy_forward", x.clone(), target, smoothing, reduced, None, -100, overwrite)
    close = 33 * 2.0**-22
    same(found, expected, close)
    reference = torch.nn.functional.cross_entropy(x.double().view(-1, 33), target.view(-1), label_smoothing=smoothing, reduction="none")
    assert relative_error(found[0], reference.sum() / 9 if reduced else reference.view(2, 5)) <= close
    grad = torch.randn(()) if reduced else torch.randn(2, 5)
    _, saved, stats, _, count, rank, world = found
    backward = both("cross_entropy", "cross_entropy_backward", saved.clone(), stats, target, count, grad, smoothing, reduced, rank, world, -100)
    same(backward[:1], backward[1:], close if dtype is torch.float32 else 2.0**-8)


@pytest.mark.usefixtures("te")
def test_cross_entropy_of_rows_that_lie_apart() -> None:
    x, target = torch.randn(5, 2, 33).transpose(0, 1), torch.randint(0, 33, (2, 5))
    same(*both("cross_entropy", "cross_entropy_forward", x, target, 0.0, False, None, -100, False), tolerance=33 * 2.0**-22)


@pytest.mark.usefixtures("te")
@DTYPES
def test_gradients_of_grouped_biases(dtype: torch.dtype) -> None:
    dy, offsets, bias, scales = torch.randn(TOKENS, HIDDEN).to(dtype), torch.tensor([0, 4, 4, TOKENS]), torch.randn(3, HIDDEN), torch.rand(TOKENS)
    close = TOKENS * 2.0**-22
    for former in (None, torch.ones(3, HIDDEN)):
        found, expected = both("grouped_dbias_dscales", "compute_grouped_dbias", dy, offsets, 3, former)
        same([found], [expected], close)
    same(*both("grouped_dbias_dscales", "compute_grouped_dbias_dscales", dy, scales, bias, offsets), tolerance=close)


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize("shape", [(3, 5), (128, 4), (130, 9)])
def test_scales_are_padded(shape: tuple[int, int]) -> None:
    found, expected = both("pad", "pad_columnwise_scale_inv", torch.randint(1, 255, shape, dtype=torch.uint8))
    same([found], [expected])


def test_a_layer_of_experts_is_routed_at_the_size_of_a_model(te: Any) -> None:
    """4096 tokens of 512, which are too many for the interpreter."""
    x = torch.randn(4096, 512, dtype=BF16, device="cuda", requires_grad=True)
    probs = torch.zeros(4096, 8, device="cuda").scatter(1, torch.randn(4096, 8).topk(2, 1).indices, 0.5).requires_grad_()
    permuted, rows = te.moe_permute(x, (probs > 0).int(), num_out_tokens=8192, map_type="mask")
    merged = te.moe_unpermute(permuted, rows, merging_probs=probs, restore_shape=x.shape, map_type="mask")
    merged.sum().backward()
    assert torch.equal(merged, x) and x.grad is not None and probs.grad is not None and torch.equal(x.grad, torch.ones_like(x))
    assert relative_error(probs.grad, (probs.detach() > 0) * x.detach().double().sum(1, keepdim=True)) <= 2.0**-8
