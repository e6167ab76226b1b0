"""Modules that NVIDIA's package would capture in CUDA graphs: what is refused, before anything is changed, and what is undone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fusible import Float8CurrentScaling, Linear, MXFP8BlockScaling, autocast
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


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "a deep copy": copy.deepcopy,
    "a pickled one": lambda module: pickle.loads(pickle.dumps(module)),
    "a deep copy of what holds it": lambda module: copy.deepcopy(nn.Sequential(module))[0],
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_computes_by_parameters_of_its_own(way: str) -> None:
    """As it was told; and what is undone of the copy is not of the module."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    module = run_uncaptured(entered, Linear(32, 32), {"enabled": True})
    rounded, other = module(x), COPIES[way](module)
    assert torch.equal(other(x), rounded)
    with torch.no_grad():
        other.weight.mul_(2)
        other.bias.mul_(2)
    assert torch.equal(other(x), 2 * rounded) and torch.equal(module(x), rounded)
    other.reset()
    assert not torch.equal(other(x), 2 * rounded) and torch.equal(module(x), rounded) and hasattr(module, "reset")


def test_a_copy_shares_its_group() -> None:
    """A group of processes is none that can be copied."""
    group = nn.Identity()
    group.__deepcopy__ = group.__reduce_ex__ = None  # type: ignore[assignment, method-assign]
    module = run_uncaptured(entered, Linear(32, 32), {"enabled": True, "amax_reduction_group": group})
    assert copy.deepcopy(module)(torch.ones(16, 32)).isfinite().all()


def test_a_module_that_is_told_twice_does_what_it_was_told_last() -> None:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    module, recipes = Linear(32, 32), (Float8CurrentScaling(), MXFP8BlockScaling())
    wanted = []
    for recipe in recipes:
        with autocast(recipe=recipe):
            wanted.append(module(x))
    exact = module(x)
    for recipe in recipes:
        run_uncaptured(entered, module, {"enabled": True, "recipe": recipe})
    assert torch.equal(module(x), wanted[1])
    run_uncaptured(entered, module.eval(), {"enabled": True, "recipe": recipes[0]})
    assert torch.equal(module(x), wanted[0]) and torch.equal(module.train()(x), wanted[1])  # each mode has its own
    module.reset()
    assert torch.equal(module(x), wanted[1]) and torch.equal(module.eval()(x), exact)
    module.train().reset()
    assert torch.equal(module(x), wanted[0])
    module.reset()
    assert torch.equal(module(x), exact) and not hasattr(module, "reset")
