"""Modules that NVIDIA's package would capture in CUDA graphs: what is refused, before anything is changed, and what is undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fusible import Float8CurrentScaling, Linear, autocast
from fusible.compat.uncaptured import run_uncaptured
from fusible.errors import ArgumentError, DTypeError, NotServedError

WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a function": (lambda m: m.forward, {}, DTypeError, "make_graphed_callables: expected modules, got method; pass a module"),
    "an order": (lambda m: m, {"_order": [1, -1]}, NotServedError, "make_graphed_callables without CUDA graphs: expected no _order"),
    "both names": (lambda m: m, {"enabled": True, "fp8_enabled": True}, ArgumentError, "got fp8_enabled too, its former name; leave that out"),
    "too many": (lambda m: (m, m), {"enabled": (True,) * 3}, ArgumentError, "the modules of make_graphed_callables: expected 2 of enabled, got 3"),
    "a number": (lambda m: m, {"enabled": 1}, DTypeError, "enabled of make_graphed_callables: expected True or False, got 1"),
}


def entered(enabled: bool, calibrating: bool, recipe: Any, amax_reduction_group: Any) -> autocast:
    return autocast(enabled, Float8CurrentScaling() if recipe is None else recipe, amax_reduction_group=amax_reduction_group)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_leaves_the_modules_alone(name: str) -> None:
    module = nn.Linear(4, 4)
    given, options, error, sentence = WRONG[name]
    with pytest.raises(error) as caught:
        run_uncaptured(entered, given(module), options)
    assert sentence in str(caught.value)
    assert "forward" not in vars(module) and not hasattr(module, "reset")


def test_a_module_computes_as_it_was_told_until_it_is_reset() -> None:
    module, x = Linear(32, 32), torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    exact = module(x)
    with autocast(recipe=Float8CurrentScaling()):
        rounded = module(x)
    assert not torch.equal(rounded, exact)
    assert run_uncaptured(entered, module, {"fp8_enabled": True}) is module
    assert torch.equal(module(x), rounded) and torch.equal(module.eval()(x), exact)
    module.train().reset()
    assert torch.equal(module(x), exact) and not hasattr(module, "reset")
