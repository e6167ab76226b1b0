"""An 8-bit copy of a weight stands for its bytes and for its scales: no call computes with one that is stale, whoever wrote the weight and how."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from weight_writes import GROUPED, MODELS, WIDTH, WRITES, weights

import fusible
from fusible.quantized import Recipe

RECIPES: dict[str, Recipe] = {
    "delayed": fusible.DelayedScaling(amax_history_len=3),
    "current": fusible.Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "block": fusible.Float8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(),
}
Results = list[Tensor | None]


def rows(seed: int) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module, recipe: Recipe, seed: int, call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)) -> Results:
    """y, and the gradients of x and of all parameters."""
    x = rows(seed).requires_grad_()
    model.zero_grad()
    torch.manual_seed(seed)  # NVFP4 rounds gradients by chance
    with fusible.autocast(recipe=recipe):
        y = call(model, x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def checkpointed(model: nn.Module, recipe: Recipe, seed: int) -> Results:
    return trained(model, recipe, seed, lambda model, x: checkpoint(model, x, use_reentrant=False))


def inferred(model: nn.Module, recipe: Recipe, seed: int) -> Results:
    with torch.no_grad(), fusible.autocast(recipe=recipe):
        return [model(rows(seed))]


def in_inference_mode(model: nn.Module, recipe: Recipe, seed: int) -> Results:
    with torch.inference_mode(), fusible.autocast(recipe=recipe):
        return [model(rows(seed))]


MODES: dict[str, Callable[[nn.Module, Recipe, int], Results]] = {
    "training": trained,
    "checkpointed": checkpointed,
    "no_grad": inferred,
    "inference_mode": in_inference_mode,
}


def made(kind: str, frozen: bool, executor: str = "eager") -> Any:
    torch.manual_seed(0)
    model: Any = {**MODELS, **GROUPED}[kind]()
    for _, _, weight in weights(model):
        weight.requires_grad_(not frozen)
    return model if executor == "eager" else model.compile(executor)


def same(a: Results, b: Results) -> bool:
    return len(a) == len(b) and all((p is None) == (q is None) and (p is None or torch.equal(p, q)) for p, q in zip(a, b, strict=True))  # type: ignore[arg-type]


def check(kind: str, write: str, recipe: Recipe, frozen: bool, run: Callable[..., Results], executor: str = "eager") -> None:
    """After some calls, whose copies it keeps, a model is written to. A fresh one with those values and that scaling state gives the same."""
    model = made(kind, frozen, executor)
    for seed in range(3):
        run(model, recipe, seed)
    before = run(copy.deepcopy(model), recipe, 9)
    model = WRITES[write](model) or model
    fresh = made(kind, frozen, executor)
    if write == "tied":
        WRITES[write](fresh)
    fresh.load_state_dict(model.state_dict())
    found = [run(model, recipe, seed) for seed in (9, 10, 11)]
    assert all(same(mine, run(fresh, recipe, seed)) for mine, seed in zip(found, (9, 10, 11), strict=True))
    assert same(before, found[0]) == (write == "restored")


CASES = list(itertools.product(WRITES, RECIPES, (False, True), MODES))
DRAWN = [
    (write, recipe, (w + r // 2) % 2 == 1, list(MODES)[(w + r) % len(MODES)]) for w, write in enumerate(WRITES) for r, recipe in enumerate(RECIPES)
]
"""Every write with each recipe, and in each mode; the rest of the product takes a minute."""


@pytest.mark.parametrize(("write", "recipe", "frozen", "mode"), DRAWN)
def test_no_call_computes_with_a_stale_copy(write: str, recipe: str, frozen: bool, mode: str) -> None:
    check("Sequential", write, RECIPES[recipe], frozen, MODES[mode])


def test_the_draw_has_every_pair_of_a_write_with_a_recipe_and_with_a_mode() -> None:
    for part in (1, 2, 3):
        assert {(case[0], case[part]) for case in CASES} == {(case[0], case[part]) for case in DRAWN}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("write", WRITES)
def test_no_call_computes_with_a_stale_copy_in_any_combination(write: str, kind: str) -> None:
    for _, recipe, frozen, mode in [case for case in CASES if case[0] == write]:
        check(kind, write, RECIPES[recipe], frozen, MODES[mode])


GROUPED_CASES = [
    (list(GROUPED)[w % 3], write, list(RECIPES)[(w + w // 5) % len(RECIPES)], list(MODES)[(w // 3) % len(MODES)]) for w, write in enumerate(WRITES)
]
"""Frozen weights of groups: every write, with kinds, recipes and modes by turns; all of the product is among the slow tests."""


@pytest.mark.parametrize(("kind", "write", "recipe", "mode"), GROUPED_CASES)
def test_frozen_weights_of_groups_alike(kind: str, write: str, recipe: str, mode: str) -> None:
    check(kind, write, RECIPES[recipe], True, MODES[mode])


@pytest.mark.slow
@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("write", WRITES)
def test_weights_of_groups_in_any_combination(write: str, kind: str) -> None:
    for _, recipe, frozen, mode in [case for case in CASES if case[0] == write]:
        check(kind, write, RECIPES[recipe], frozen, MODES[mode])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [*GROUPED, *MODELS])
def test_a_frozen_weight_is_quantized_by_a_scale_of_its_own_size(kind: str, recipe: str) -> None:
    """Small weights, as those of a fine-tuned model's last layers: by the scale 1 of a first cast most of their bits would be lost."""
    results = []
    for frozen in (True, False):
        model = made(kind, frozen)
        for _, _, weight in weights(model):
            weight.data.mul_(2.0**-9)
        for seed in range(3):
            trained(model, RECIPES[recipe], seed)
        results.append(inferred(model, RECIPES[recipe], 9)[0])
    assert torch.equal(*results)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", ["modules", "ops"])
@pytest.mark.parametrize("write", WRITES)
def test_modules_and_operations_alike(write: str, kind: str) -> None:
    check(kind, write, RECIPES["delayed"], False, trained)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize("write", ["data.copy_", "numpy", "data = data.t()", "replaced", "optimizer by data", "restored"])
def test_compiled_passes_alike(write: str, recipe: str) -> None:
    pytest.importorskip("jaxlib")
    check("Sequential", write, RECIPES[recipe], False, trained, executor="xla")


@pytest.mark.parametrize("write", ["numpy", "data ="])
def test_programs_of_torch_compile_alike(write: str) -> None:
    torch._dynamo.reset()
    model, recipe = made("Sequential", False), RECIPES["delayed"]
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(3):
        trained(model, recipe, seed, lambda _, x: compiled(x))
    WRITES[write](model)
    fresh = made("Sequential", False)
    fresh.load_state_dict(model.state_dict())
    assert same(trained(model, recipe, 9, lambda _, x: compiled(x)), trained(fresh, recipe, 9))
    torch._dynamo.reset()
