"""``HighPrecision("bfloat16")``: an fp32 module computes as its bf16 copy does, and its parameters and their gradients stay fp32."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

from fusible import GELU, HighPrecision, LayerNorm, Linear, MultiHeadedSelfAttention, Residual, Sequential, autocast

WIDTH, STEPS = 32, 3
BF16 = torch.finfo(torch.bfloat16).eps
XLA = pytest.mark.skipif(importlib.util.find_spec("jaxlib") is None, reason="jaxlib is not installed")


def model() -> Sequential:
    torch.manual_seed(1)
    attention = Residual(LayerNorm(WIDTH), Linear(WIDTH, 3 * WIDTH), MultiHeadedSelfAttention(WIDTH, 4), Linear(WIDTH, WIDTH))
    return Sequential(attention, LayerNorm(WIDTH), Linear(WIDTH, 2 * WIDTH), GELU(), Linear(2 * WIDTH, WIDTH))


@pytest.mark.parametrize("executor", ["eager", pytest.param("xla", marks=XLA)])
@pytest.mark.parametrize("lowest", ["bfloat16", "float16"])
def test_an_fp32_module_computes_as_its_copy_of_16_bits(lowest: str, executor: str) -> None:
    dtype = getattr(torch, lowest)
    ours = model().compile(executor)
    theirs = copy.deepcopy(ours).to(dtype)
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(2))
    a, b = x.clone().requires_grad_(), x.to(dtype).requires_grad_()
    with autocast(recipe=HighPrecision(lowest)):
        y = ours(a)
    z = theirs(b)
    assert y.dtype is z.dtype is dtype and a.dtype is torch.float32
    y.float().square().mean().backward()
    z.float().square().mean().backward()
    assert a.grad is not None and a.grad.dtype is torch.float32
    # A norm's parameters are read in fp32 here, and gradients are not rounded: each of a few layers may differ by a step of the 16 bits.
    bound = 8 * torch.finfo(dtype).eps
    for found, right in ((y, z), *((p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))):
        assert found is not None and right is not None
        assert (found.float() - right.float()).norm() <= bound * right.float().norm()
    assert all(p.dtype is torch.float32 and p.grad is not None and p.grad.dtype is torch.float32 for p in ours.parameters())


def test_small_steps_are_not_lost_in_the_master_parameters() -> None:
    """An update below half a step of bf16 moves an fp32 parameter, whose products are of bf16 all the same."""
    ours, recipe = Sequential(Linear(WIDTH, WIDTH, bias=False)), HighPrecision("bfloat16")
    before = ours[0].weight.detach().clone()  # type: ignore[operator, union-attr]
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-7)
    x = torch.randn(4, WIDTH)
    with autocast(recipe=recipe):
        first = ours(x)
        first.float().square().sum().backward()
        optimizer.step()
        second = ours(x)
    moved = (ours[0].weight - before).abs()  # type: ignore[operator, union-attr]
    assert moved.max() > 0 and (moved <= BF16 * before.abs().clamp_min(1e-3)).all()
    with torch.no_grad():
        wanted = (x.bfloat16().double() @ before.bfloat16().double().T).bfloat16()
    assert torch.equal(first, wanted) and second.dtype is torch.bfloat16


def test_wider_and_none_are_as_they_were() -> None:
    ours, x = Sequential(Linear(WIDTH, WIDTH)), torch.randn(3, WIDTH)
    with autocast(recipe=HighPrecision()):
        assert ours(x).dtype is torch.float32 and ours(x.bfloat16()).dtype is torch.bfloat16
    with autocast(recipe=HighPrecision("float32")):
        assert ours(x.bfloat16()).dtype is torch.float32
