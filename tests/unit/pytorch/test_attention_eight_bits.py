"""``fp8_dpa``: attention on operands of 8 bits is attention on what these stand for, forward and backward; what is not served is refused."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from fusible import autocast
from fusible.errors import ArgumentError
from fusible.pytorch import (
    CrossAttention,
    DelayedScaling,
    DotProductAttention,
    Float8CurrentScaling,
    KVCache,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Sequential,
)
from fusible.quantized import QuantizerRole, quantizer_for_role

HEADS, WIDTH, BATCH, LONGEST = 2, 32, 2, 16
BOUND = 64 * (LONGEST + WIDTH) * torch.finfo(torch.float32).eps
SERVED = {"current": Float8CurrentScaling(fp8_dpa=True), "mxfp8": MXFP8BlockScaling(fp8_dpa=True)}
REFUSED: dict[str, Recipe] = {
    "delayed": DelayedScaling(fp8_dpa=True),
    "fp8_mha": Float8CurrentScaling(fp8_dpa=True, fp8_mha=True),
    "nvfp4": NVFP4BlockScaling(fp8_dpa=True),
    "an override": MXFP8BlockScaling(fp8_dpa=True, backward_override="dequantized"),
}
EXECUTORS = ["eager", pytest.param("xla", marks=pytest.mark.skipif(importlib.util.find_spec("jaxlib") is None, reason="jaxlib is not installed"))]


def rounded(x: Tensor, recipe: Recipe, kind: str) -> Tensor:
    """What a tensor of heads side by side stands for, once the recipe's quantizer has rounded it."""
    quantizer = quantizer_for_role(recipe, QuantizerRole("dpa", kind))
    rows = x.reshape(-1, WIDTH)
    whole = torch.cat([rows, rows.new_zeros(-len(rows) % 32, WIDTH)])  # a scale is a row's or the tensor's, so zeros change none
    return quantizer(whole).dequantize()[: len(rows)].view(x.shape)  # type: ignore[operator, misc, no-any-return]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("recipe", SERVED)
def test_attention_is_that_of_the_rounded_operands(recipe: str, executor: str) -> None:
    x = torch.randn(BATCH, LONGEST, 3 * HEADS * WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    dy = torch.randn(BATCH, LONGEST, HEADS * WIDTH, generator=torch.Generator().manual_seed(2))
    with autocast(recipe=SERVED[recipe]):
        y = Sequential(DotProductAttention(HEADS, WIDTH)).compile(executor)(x)
    y.backward(dy)
    parts = [rounded(part, SERVED[recipe], "input") for part in x.detach().chunk(3, -1)]
    known = torch.cat(parts, -1).requires_grad_()
    plain = Sequential(DotProductAttention(HEADS, WIDTH))
    plain(known).backward(rounded(dy, SERVED[recipe], "grad_output"))
    assert x.grad is not None and known.grad is not None
    assert (y - plain(known)).abs().max() <= BOUND and (x.grad - known.grad).abs().max() <= BOUND * max(1.0, known.grad.abs().max().item())
    assert (y - plain(x)).abs().max() > 100 * BOUND  # of the operands as they came it is another


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("recipe", SERVED)
def test_a_cache_holds_what_the_rounded_operands_stand_for(recipe: str, executor: str) -> None:
    x = torch.randn(1, LONGEST, 3 * HEADS * WIDTH, generator=torch.Generator().manual_seed(3))
    cache, lengths = KVCache(1, LONGEST, dtype=torch.float32), torch.tensor([LONGEST])
    model, plain = Sequential(DotProductAttention(HEADS, WIDTH)).compile(executor), Sequential(DotProductAttention(HEADS, WIDTH))
    with torch.no_grad(), autocast(recipe=SERVED[recipe]):
        y = model(x[0], lengths, cache=cache)
    q, k, v = (rounded(part, SERVED[recipe], "input") for part in x.chunk(3, -1))
    with torch.no_grad():
        wanted = plain(torch.cat([q, k, v], -1))[0]
        assert (y - wanted).abs().max() <= BOUND < (wanted - plain(x)[0]).abs().max() / 100


def test_explain_shows_the_operands_types() -> None:
    with autocast(recipe=SERVED["mxfp8"]):
        text = Sequential(Linear(64, 192), DotProductAttention(2, 32)).explain(torch.randn(32, 64))
    assert "DotProductAttention(q, k, v e4m3[mxfp8])" in text


def test_what_is_kept_for_backward_is_in_8_bits() -> None:
    kept: list[torch.dtype] = []
    x = torch.randn(BATCH, LONGEST, 3 * HEADS * WIDTH).bfloat16().requires_grad_()
    with autocast(recipe=SERVED["current"]), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
        DotProductAttention(HEADS, WIDTH)(x)
    assert kept.count(torch.uint8) == 3 and kept.count(torch.bfloat16) == 1


@pytest.mark.parametrize("recipe", REFUSED)
def test_what_is_not_served_is_refused_in_a_sentence(recipe: str) -> None:
    asked = "fp8_mha" if REFUSED[recipe].fp8_mha else "fp8_dpa"
    named = type(REFUSED[recipe]).__name__
    for module, extra in ((DotProductAttention(HEADS, WIDTH), []), (CrossAttention(HEADS, WIDTH), [torch.randn(1, 3, 2 * HEADS * WIDTH)])):
        x = torch.randn(1, 32, (3 if not extra else 1) * HEADS * WIDTH)
        text = f"the {named} of {type(module).__name__}(.*): expected {asked}=False"
        with pytest.raises(ArgumentError, match=text), autocast(recipe=REFUSED[recipe]):
            module(x, extra_inputs=extra)
    with autocast(recipe=REFUSED[recipe]):
        assert Linear(64, 64)(torch.randn(128, 64)).isfinite().all()  # what is no attention has nothing to do with it


@pytest.mark.parametrize("recipe", SERVED)
def test_cross_attention_and_padding_have_it_too(recipe: str) -> None:
    x, kv = torch.randn(BATCH, LONGEST, HEADS * WIDTH), torch.randn(BATCH, LONGEST, 2 * HEADS * WIDTH)
    module, lens = CrossAttention(HEADS, WIDTH), torch.tensor([16, 7])
    with autocast(recipe=SERVED[recipe]):
        y = module(x, lens, extra_inputs=[kv])
    known = torch.cat([rounded(part, SERVED[recipe], "input") for part in kv.chunk(2, -1)], -1)
    first = rounded(torch.cat([x[0], x[1, :7]]), SERVED[recipe], "input")[-7:]
    wanted = module(first[None], extra_inputs=[known[1:]])
    assert (y[1, :7] - wanted[0]).abs().max() <= BOUND and not y[1, 7:].any()
