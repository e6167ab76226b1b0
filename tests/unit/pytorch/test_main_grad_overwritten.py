"""Gradients that are written over ``main_grad``: of weights with ``overwrite_main_grad``, and in the call of a first microbatch. And which
tensor that is: the one that is there when backward comes.

Generated over every module that is told to write gradients to ``main_grad``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import fusible.pytorch
from fusible import autocast
from fusible.compat import te_modules
from fusible.errors import FusibleError
from fusible.pytorch import GELU, DelayedScaling, HighPrecision, Linear, Recipe, Sequential, ops

OPTIONS = ("accumulate_into_main_grad", "fuse_wgrad_accumulation")
SPACES = {"fusible": fusible.pytorch, "ops": ops, "te": te_modules}
WIDTH, ROWS, BEFORE = 32, 48, 7.0
SIZES = [16, 8, 24]


class Case(NamedTuple):
    """How a module is made, given its class and whether it writes to ``main_grad``, and which calls of it take further arguments."""

    make: Callable[[Any, bool], torch.nn.Module]
    further: tuple[Any, ...] = ()
    shape: tuple[int, ...] = (ROWS, WIDTH)


def _plain(option: str, *sizes: int, **options: Any) -> Callable[[Any, bool], torch.nn.Module]:
    return lambda of, wanted: of(*sizes, **{option: wanted}, **options)


_OURS, _THEIRS = OPTIONS
CASES = {
    "fusible.Linear": Case(_plain(_OURS, WIDTH, WIDTH)),
    "ops.BasicLinear": Case(_plain(_OURS, WIDTH, WIDTH)),
    "ops.GroupedLinear": Case(_plain(_OURS, 3, WIDTH, WIDTH), (torch.tensor(SIZES),)),
    "ops.Linear": Case(_plain(_OURS, WIDTH, WIDTH)),
    "te.GroupedLinear": Case(_plain(_THEIRS, 3, WIDTH, WIDTH), (SIZES,)),
    "te.LayerNormLinear": Case(_plain(_THEIRS, WIDTH, WIDTH)),
    "te.LayerNormMLP": Case(_plain(_THEIRS, WIDTH, WIDTH)),
    "te.Linear": Case(_plain(_THEIRS, WIDTH, WIDTH)),
    "te.MultiheadAttention": Case(_plain(_THEIRS, WIDTH, 2, fuse_qkv_params=True, attention_dropout=0.0), shape=(12, 4, WIDTH)),
    "te.TransformerLayer": Case(
        _plain(_THEIRS, WIDTH, WIDTH, 2, fuse_qkv_params=True, attention_dropout=0.0, hidden_dropout=0.0), shape=(12, 4, WIDTH)
    ),
}
EACH = pytest.mark.parametrize("name", CASES)
RECIPES = pytest.mark.parametrize("recipe", [HighPrecision(), DelayedScaling()], ids=lambda r: type(r).__name__)


def made(name: str, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    space, _, own = name.partition(".")
    return CASES[name].make(lambda *a, **k: getattr(SPACES[space], own)(*a, **{**k, **options}), True)


def weights_of(module: torch.nn.Module) -> list[Any]:
    return [p for key, p in module.named_parameters() if "weight" in key and p.dim() > 1]


def begin(module: torch.nn.Module, value: float, flags: tuple[bool, ...] = (False,)) -> list[Any]:
    """Give the weights a ``main_grad`` of ``value``, and the flags in turn."""
    weights = weights_of(module)
    for i, weight in enumerate(weights):
        weight.main_grad, weight.overwrite_main_grad = torch.full(weight.shape, value), flags[i % len(flags)]
    return weights


def called(module: torch.nn.Module, name: str, seed: int = 0, recipe: Recipe | None = None, dtype: torch.dtype | None = None, **options: Any) -> Any:
    x = torch.randn(CASES[name].shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with autocast(recipe=recipe or HighPrecision()):
        return module(x, *CASES[name].further, **options).float().square().sum()


def test_every_module_that_writes_to_main_grad_is_a_case() -> None:
    found = set()
    for space, module in SPACES.items():
        for name in dir(module):
            of = getattr(module, name)
            if inspect.isclass(of) and not set(OPTIONS).isdisjoint(inspect.signature(of).parameters):
                found.add(f"{space}.{name}")
    assert found == set(CASES)


@EACH
@RECIPES
@pytest.mark.parametrize("flags", [(True,), (True, False)], ids=["all", "every other"])
def test_it_is_written_over(name: str, recipe: Recipe, flags: tuple[bool, ...]) -> None:
    """As if there had been zeros, to the bit; where the flag is not set it is added."""
    results = {}
    for value, own in ((0.0, (False,)), (BEFORE, (False,)), (BEFORE, flags)):
        module = made(name)
        weights = begin(module, value, own)
        called(module, name, recipe=recipe).backward()
        results[value, own] = [weight.main_grad for weight in weights]
        assert all(weight.grad is None for weight in weights)
    for i, found in enumerate(results[BEFORE, flags]):
        assert torch.equal(found, results[BEFORE if not flags[i % len(flags)] else 0.0, (False,)][i])
        assert found.count_nonzero() and not torch.equal(results[0.0, (False,)][i], results[BEFORE, (False,)][i])


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("te.")])
def test_the_first_microbatch_writes_over_it(name: str) -> None:
    """``is_first_microbatch`` of the package's modules; later ones add."""
    results = []
    for value, first in ((0.0, None), (BEFORE, True)):
        module = made(name)
        weights = begin(module, value)
        for seed, microbatch in ((0, first), (1, None if first is None else False)):
            called(module, name, seed, is_first_microbatch=microbatch).backward()
        results.append([weight.main_grad for weight in weights])
    assert all(torch.equal(found, wanted) for found, wanted in zip(results[1], results[0], strict=True))


@EACH
def test_a_later_backward_writes_over_the_former(name: str) -> None:
    module, fresh = made(name), made(name)
    for weight in begin(module, BEFORE, (True,)):
        weight.main_grad.fill_(torch.nan)
    called(module, name, 1).backward()
    called(module, name, 0).backward()
    wanted = begin(fresh, 0.0)
    called(fresh, name, 0).backward()
    assert all(torch.equal(own.main_grad, other.main_grad) for own, other in zip(weights_of(module), wanted, strict=True))


@pytest.mark.parametrize("executor", ["eager", "xla"])
def test_of_a_weight_that_is_used_twice_the_first_use_stays(executor: str) -> None:
    """As in NVIDIA's modules, where each product writes over what was there, the first use's last. Without the flag both are added."""
    layer = made("fusible.Linear")
    twins = [copy.deepcopy(layer) for _ in range(2)]
    begin(twins[0], 0.0)
    begin(twins[1], 0.0)
    called(Sequential(twins[0], GELU(), twins[1]).compile(executor), "fusible.Linear").backward()
    first, second = (weights_of(twin)[0].main_grad for twin in twins)
    model = Sequential(layer, GELU(), layer).compile(executor)
    for value, flag, wanted in ((BEFORE, True, first), (BEFORE, False, BEFORE + second + first)):
        (weight,) = begin(layer, value, (flag,))
        called(model, "fusible.Linear").backward()
        # Sums over the rows in fp32, in which order the executor likes.
        torch.testing.assert_close(weight.main_grad, wanted, rtol=0, atol=ROWS * 2.0**-23 * float(first.abs().max() + second.abs().max() + value))


@pytest.mark.parametrize("executor", ["eager", "xla"])
def test_what_is_written_is_not_rounded_to_the_dtype_of_the_weight(executor: str) -> None:
    results = []
    for value, flags in ((0.0, (False,)), (BEFORE, (True,))):
        torch.manual_seed(0)
        model = Sequential(Linear(WIDTH, WIDTH, accumulate_into_main_grad=True)).bfloat16().compile(executor)
        (weight,) = begin(model, value, flags)
        called(model, "fusible.Linear", dtype=torch.bfloat16).backward()
        results.append(weight.main_grad)
    assert torch.equal(*results) and not torch.equal(results[1], results[1].bfloat16().float())


@pytest.mark.parametrize("single", [False, True], ids=["many", "single"])
@pytest.mark.parametrize("name", ["ops.GroupedLinear", "te.GroupedLinear"])
def test_delayed_gradients_are_written_over_it(name: str, single: bool) -> None:
    results = []
    for value, flags in ((0.0, (False,)), (BEFORE, (True,))):
        module: Any = made(name, delay_wgrad_compute=True, single_grouped_weight=single)
        weights = begin(module, value, flags)
        called(module, name).backward()
        assert all(torch.equal(weight.main_grad, torch.full_like(weight, value)) for weight in weights)
        module.backward_dw()
        results.append([weight.main_grad for weight in weights])
    assert all(torch.equal(found, wanted) for found, wanted in zip(results[1], results[0], strict=True))


def test_delayed_gradients_remember_which_microbatch_was_the_first() -> None:
    """Both forwards are there before the first backward, as in a pipeline of processes."""
    name, results = "te.GroupedLinear", []
    for value, firsts in ((0.0, (None, None)), (BEFORE, (True, False))):
        module: Any = made(name, delay_wgrad_compute=True)
        weights = begin(module, value)
        losses = [called(module, name, seed, is_first_microbatch=first) for seed, first in enumerate(firsts)]
        for loss in losses:
            loss.backward()
        for _ in losses:
            module.backward_dw()
        results.append([weight.main_grad for weight in weights])
    assert all(torch.equal(found, wanted) for found, wanted in zip(results[1], results[0], strict=True))


@EACH
@RECIPES
@pytest.mark.parametrize("later", [True, False], ids=["another", "none"])
def test_it_is_looked_for_when_backward_comes(name: str, recipe: Recipe, later: bool) -> None:
    """A trainer may allocate its sums anew, or give them up, between a forward and its backward."""
    module, twin = made(name), made(name)
    formers = [weight.main_grad for weight in begin(module, BEFORE, (True,))]
    loss = called(module, name, recipe=recipe)
    for weight in weights_of(module):
        weight.main_grad, weight.overwrite_main_grad = torch.zeros(weight.shape) if later else None, False
    loss.backward()
    begin(twin, 0.0)
    called(twin, name, recipe=recipe).backward()
    assert all((former == BEFORE).all() for former in formers)
    for weight, other in zip(weights_of(module), weights_of(twin), strict=True):
        assert (weight.grad is None) is later
        torch.testing.assert_close(weight.main_grad if later else weight.grad, other.main_grad)


ODD: dict[str, Callable[[torch.Tensor], Any]] = {
    "another shape": lambda weight: torch.zeros(weight.numel()),
    "another device": lambda weight: torch.zeros(weight.shape, device="meta"),
    "fp64": lambda weight: torch.zeros(weight.shape, dtype=torch.float64),
    "integers": lambda weight: torch.zeros(weight.shape, dtype=torch.int32),
    "no tensor": lambda weight: weight.tolist(),
}


@EACH
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("late", [False, True], ids=["before forward", "before backward"])
def test_one_that_cannot_be_added_to_is_refused(name: str, odd: str, late: bool) -> None:
    """In one sentence; what is set before the forward is refused there."""
    module = made(name)
    weights = begin(module, 0.0)
    loss = called(module, name) if late else None
    weights[-1].main_grad = ODD[odd](weights[-1])
    with pytest.raises(FusibleError, match="main_grad of a parameter"):
        _ = called(module, name) if loss is None else loss.backward()
    weights[-1].main_grad = torch.zeros(weights[-1].shape)
    called(module, name).backward()
