"""Whatever torch's default dtype is, scales, amaxes and sums are fp32: a model computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from quantization_error import RECIPES

import fusible
from fusible.pytorch import ops

WIDTH = 64


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    bf16 = torch.bfloat16
    return fusible.Sequential(
        fusible.LayerNorm(WIDTH, param_dtype=bf16),
        fusible.Linear(WIDTH, 3 * WIDTH, param_dtype=bf16),
        fusible.MultiHeadedSelfAttention(WIDTH, 2, rope_base=10000.0),
        fusible.Linear(WIDTH, 2 * WIDTH, param_dtype=bf16),
        fusible.SwiGLU(),
        fusible.RMSNorm(WIDTH, param_dtype=bf16),
        fusible.Linear(WIDTH, WIDTH, param_dtype=bf16),
        fusible.GELU(),
    )


def _trained(recipe: fusible.Recipe | None, dtype: torch.dtype) -> list[torch.Tensor]:
    model, results = _model(), []
    generator = torch.Generator().manual_seed(1)
    with default_dtype(dtype), fusible.autocast(enabled=recipe is not None, recipe=recipe):
        for _ in range(3):
            x = torch.randn(2, 32, WIDTH, generator=generator, dtype=torch.float32).bfloat16().requires_grad_()
            y = model(x)
            y.float().square().sum().backward()
            results += [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
            model.zero_grad()
    return results


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["none", *RECIPES])
def test_a_model_trains_the_same_under_another_default_dtype(recipe: fusible.Recipe | None) -> None:
    for found, wanted in zip(_trained(recipe, torch.bfloat16), _trained(recipe, torch.float32), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_grouped_layers_and_quantized_weights_are_the_same_under_another_default_dtype() -> None:
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        x = torch.randn(64, WIDTH, dtype=torch.float32).bfloat16().requires_grad_()
        grouped = ops.GroupedLinear(2, WIDTH, WIDTH, dtype=torch.bfloat16)
        weight = torch.randn(WIDTH, WIDTH, dtype=torch.float32).bfloat16()
        with default_dtype(dtype), fusible.autocast(recipe=fusible.DelayedScaling()):
            with fusible.quantized_model_init(recipe=fusible.DelayedScaling()):
                held = fusible.Linear(WIDTH, WIDTH, param_dtype=torch.bfloat16, weight_init_method=lambda _, weight=weight: weight.clone())
            for _ in range(2):
                y = held(grouped(x, torch.tensor([40, 24])))
            y.float().square().sum().backward()
        results.append([y.detach(), x.grad, grouped.weight0.grad])
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)
