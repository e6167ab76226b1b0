"""What the tests of fusible operations share: small models, a step of training, and what happened in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusible
from fusible import tex
from fusible.compute_pipeline import Plan
from fusible.pytorch import ops

__all__ = ["RECIPES", "WIDTH", "batch", "calls_of", "every_recipe", "linear", "plan_of", "same", "step"]

WIDTH = 64
RECIPES = [
    fusible.DelayedScaling(),
    fusible.Float8CurrentScaling(),
    fusible.MXFP8BlockScaling(),
    fusible.Float8BlockScaling(),
    fusible.NVFP4BlockScaling(),
]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)


def batch(seed: int = 0, *shape: int) -> Tensor:
    return torch.randn(shape or (WIDTH, WIDTH), generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: Tensor, recipe: fusible.Recipe | None, *extra: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters; the random bits are the same each time."""
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    with fusible.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, *extra)
    y.square().sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(one.flatten(), other.flatten()) for one, other in zip(a, b, strict=True))


def plan_of(model: ops.Sequential, recipe: fusible.Recipe | None, x: Tensor | None = None) -> Plan:
    (fuser,) = model._arranged()
    x = batch() if x is None else x
    return fuser.plan(x.clone().requires_grad_(), fuser.parameters(), fusible.autocast(enabled=recipe is not None, recipe=recipe), True)


def calls_of(name: str, calls: Sequence[tex.Call]) -> int:
    return sum(call.function == name for call in calls)


def linear(**options: Any) -> ops.Linear:
    return ops.Linear(WIDTH, WIDTH, **options)
