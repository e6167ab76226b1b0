"""FP8 attention of NVIDIA's Python package, under the recipes for which it has one, against torch's attention in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from te_client import EPSILON, package_on, recipe_for, relative_error

from fusible import tex

BF16 = torch.bfloat16
TOKENS, BATCH, HEADS, WIDTH = 128, 2, 4, 64
HEADS_FIRST = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
TOKENS_FIRST = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}


@pytest.fixture
def te() -> Iterator[Any]:
    """On a device of capability 10.0, the lowest on which the package has more than delayed scaling here."""
    with package_on((10, 0)) as te:
        torch.manual_seed(0)
        yield te


@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize("layout", HEADS_FIRST)
@pytest.mark.parametrize("recipe_name", ["delayed", "current", "mxfp8"])
def test_attention_of_fp8_operands(te: Any, recipe_name: str, layout: str, mask: str) -> None:
    recipe = recipe_for(te, recipe_name, fp8_dpa=True)
    shape = (TOKENS, BATCH, HEADS, WIDTH) if layout == "sbhd" else (BATCH, TOKENS, HEADS, WIDTH)
    operands = [torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)]
    module = te.DotProductAttention(HEADS, WIDTH, qkv_format=layout, attn_mask_type=mask, attention_dropout=0.0)
    y = torch.empty(0)
    with tex.record() as calls:
        for _ in range(2):  # delayed scaling knows a tensor's amax from the second pass on
            for x in operands:
                x.grad = None
            with te.autocast(recipe=recipe):
                y = module(*operands)
            y.float().pow(2).sum().backward()
    requests = [str(call.request) for call in calls if call.function in ("fused_attn_fwd", "fused_attn_bwd")]
    assert len(requests) == 4 and all(("mxfp8" if recipe_name == "mxfp8" else "float8") in request for request in requests)

    wide = [x.detach().double().requires_grad_() for x in operands]
    q, k, v = (x.permute(HEADS_FIRST[layout]) for x in wide)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")
    expected = expected.permute(TOKENS_FIRST[layout]).reshape(y.shape)
    expected.pow(2).sum().backward()
    # As of the modules: two operands of each of two products, and twice as many on the way back.
    assert 0 < relative_error(y, expected) <= EPSILON[recipe_name] * math.sqrt(4)
    for x, reference in zip(operands, wide, strict=True):
        assert x.grad is not None and reference.grad is not None
        assert 0 < relative_error(x.grad, reference.grad) <= EPSILON[recipe_name] * math.sqrt(8)


@pytest.mark.filterwarnings("ignore:Relying on pointer-based detection:DeprecationWarning")
@pytest.mark.parametrize(("recipe_name", "fp8_mha"), [("delayed", True), ("current", True), ("delayed", False), ("current", False), ("mxfp8", False)])
def test_multi_head_attention_hands_fp8_on(te: Any, recipe_name: str, fp8_mha: bool) -> None:
    """Of MXFP8 the package makes heads first of operands that lie in one buffer; handed on in MXFP8 it refuses them."""
    recipe = recipe_for(te, recipe_name, fp8_dpa=True, fp8_mha=fp8_mha)
    module = te.MultiheadAttention(HEADS * WIDTH, HEADS, attention_dropout=0.0, params_dtype=BF16)
    x = torch.randn(TOKENS, BATCH, HEADS * WIDTH, device="cuda", dtype=BF16)
    found = []
    for enabled in (True, True, False):
        module.zero_grad()
        given = x.clone().requires_grad_()
        with te.autocast(enabled=enabled, recipe=recipe):
            y = module(given)
        y.float().pow(2).sum().backward()
        found.append((y.detach(), given.grad))
    _, (y, dx), (plain_y, plain_dx) = found
    assert relative_error(y, plain_y) <= EPSILON[recipe_name] * math.sqrt(8)
    assert relative_error(dx, plain_dx) <= EPSILON[recipe_name] * math.sqrt(16)


def test_the_support_of_mxfp8_is_told(te: Any) -> None:
    """Scales of one per 32 of heads; those of NVFP4 are none of attention's."""
    with pytest.raises(ValueError, match="No dot product attention backend"), te.autocast(recipe=recipe_for(te, "nvfp4", fp8_dpa=True)):
        x = torch.randn(TOKENS, BATCH, HEADS, WIDTH, device="cuda", dtype=BF16)
        te.DotProductAttention(HEADS, WIDTH, attention_dropout=0.0)(x, x, x)
