"""What users of NVIDIA's Python package meet at the edges: training after inference, and tensors without a dimension or an element."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from te_client import RECIPES_OF_CLIENT, package, recipe_for, relative_error

from fusible import tex

BF16 = torch.bfloat16
RECIPES = pytest.mark.parametrize("recipe_name", RECIPES_OF_CLIENT)
BEFORE: dict[str, Callable[[], AbstractContextManager[Any]]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te:
        torch.manual_seed(0)
        yield te


@RECIPES
def test_training_after_inference_is_that_after_no_grad(te: Any, recipe_name: str) -> None:
    """What delayed scaling keeps, it makes in the first pass, be that in ``torch.inference_mode``."""
    torch.manual_seed(0)
    x, found = torch.randn(128, 128, device="cuda", dtype=BF16), {}
    recipe = recipe_for(te, recipe_name, **({"disable_stochastic_rounding": True} if recipe_name == "nvfp4" else {}))
    for name, before in BEFORE.items():
        torch.manual_seed(1)
        module = te.LayerNormMLP(128, 256, params_dtype=BF16)
        results = []
        for _ in range(2):
            with before(), te.autocast(recipe=recipe):
                results.append(module(x).clone())
            with te.autocast(recipe=recipe):
                y = module(x)
            y.float().pow(2).sum().backward()
            results.append(y.detach())
        found[name] = [*results, *(parameter.grad for parameter in module.parameters())]
    for one, other in zip(*found.values(), strict=True):
        assert torch.equal(one, other) and one.isfinite().all()


@RECIPES
def test_a_copy_of_a_weight_from_inference_is_written_again(te: Any, recipe_name: str) -> None:
    recipe = recipe_for(te, recipe_name)
    x, found = torch.randn(128, 128, device="cuda", dtype=BF16), {}
    for name, before in BEFORE.items():
        torch.manual_seed(1)
        module = te.Linear(128, 128, params_dtype=BF16)
        with before(), te.autocast(recipe=recipe):
            module(x, is_first_microbatch=True)
        module.weight.data.mul_(-0.5)
        with torch.no_grad(), te.autocast(recipe=recipe):
            found[name] = module(x, is_first_microbatch=True)
    assert torch.equal(*found.values()) and found["no_grad"].any()
