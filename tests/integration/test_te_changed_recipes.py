"""Recipes that a script changes after it has made them, or used them: what NVIDIA's package makes of it, and ours under its names."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from te_client import EPSILON, package, relative_error
from te_public import Side, sides

import fusible
from fusible import quantized
from fusible.compat import te_recipes
from fusible.errors import ArgumentError, DTypeError, NotServedError

CHANGES: dict[str, tuple[str, Callable[[Side], Any]]] = {
    "DelayedScaling": ("fp8_format", lambda te: te.recipe.Format.E4M3),
    "Float8CurrentScaling": ("fp8_quant_fwd_inp", lambda te: te.recipe.QParams(power_2_scale=True, amax_epsilon=16.0)),
    "MXFP8BlockScaling": ("fp8_format", lambda te: te.recipe.Format.HYBRID),
    "Float8BlockScaling": ("fp8_quant_fwd_weight", lambda te: te.recipe.QParams(power_2_scale=True, amax_epsilon=16.0)),
    "NVFP4BlockScaling": ("fp4_quant_fwd_weight", lambda te: te.recipe.QParams(fp4_2d_quantization=False)),
}
"""By recipe: an option, and another value of it that changes what is computed."""
NAMES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "mxfp8": "MXFP8BlockScaling", "block": "Float8BlockScaling"} | {
    "nvfp4": "NVFP4BlockScaling"
}
EPSILON_OF = {NAMES[short]: epsilon for short, epsilon in EPSILON.items() if short in NAMES}


def _results(te: Side, name: str, change: int | None) -> list[torch.Tensor]:
    """Output and gradients of two calls, before one of which the recipe is changed."""
    torch.manual_seed(0)
    layer, recipe = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda"), getattr(te.recipe, name)()
    if hasattr(recipe, "disable_stochastic_rounding"):
        recipe.fp4_quant_bwd_grad = te.recipe.QParams(random_hadamard_transform=True)
    found = []
    for step in range(2):
        if step == change:
            option, value = CHANGES[name]
            setattr(recipe, option, value(te))
        layer.zero_grad()
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.backward(torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).bfloat16())
        assert x.grad is not None
        found += [y.detach(), x.grad, layer.weight.grad.clone()]
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_a_recipe_that_is_changed_after_it_was_made_is_followed_as_the_package_follows_it(name: str) -> None:
    with package():
        theirs, ours = sides()
        wanted, found, unchanged = _results(theirs, name, 0), _results(ours, name, 0), _results(ours, name, None)
    for one, other in zip(found, wanted, strict=True):
        # Two operands, rounded in formats that are the same in both packages; what is rounded within a product adds bf16's own to it.
        assert relative_error(one, other) <= (2 * EPSILON_OF[name] if name == "NVFP4BlockScaling" else 2.0**-7), name
    assert any(not torch.equal(one, other) for one, other in zip(found, unchanged, strict=True))


@pytest.mark.parametrize("name", CHANGES)
def test_a_recipe_that_is_changed_between_calls_is_followed_as_it_is_then(name: str) -> None:
    """The package's modules go on with the quantizers of their first call, where the recipe is of the same class."""
    ours = sides()[1]
    changed, from_the_start, unchanged = (_results(ours, name, step) for step in (1, 0, None))
    assert all(map(torch.equal, changed[:3], unchanged[:3]))
    assert any(not torch.equal(one, other) for one, other in zip(changed[3:], unchanged[3:], strict=True))
    if name != "DelayedScaling":  # which has seen amaxes, and in another format's scales
        assert all(map(torch.equal, changed[3:], from_the_start[3:]))


@pytest.mark.parametrize("name", CHANGES)
def test_what_may_be_done_to_a_recipe_is_what_the_package_lets(name: str) -> None:
    with package():
        for te in sides():
            made, other = getattr(te.recipe, name)(), getattr(te.recipe, name)()
            option, value = CHANGES[name]
            assert made == other
            setattr(made, option, value(te))
            assert getattr(made, option) == value(te)
            if any(field.name == option for field in dataclasses.fields(made)):
                assert made != other and dataclasses.replace(other, **{option: value(te)}) == made
            made.of_a_script = 3
            assert made.of_a_script == 3 and copy.deepcopy(made) == made
            with pytest.raises(TypeError, match="unhashable"):
                hash(made)
            for params in (te.recipe.MMParams(), te.recipe.QParams()):
                with pytest.raises(AttributeError):
                    setattr(params, dataclasses.fields(params)[0].name, True)


def test_a_class_that_derives_from_a_recipe_may_have_quantization_parameters_of_its_own() -> None:
    with package():
        for te in sides():

            class Bounded(te.recipe.Float8CurrentScaling):  # type: ignore[name-defined,misc]
                fp8_quant_fwd_inp = te.recipe.QParams(amax_epsilon=1e-3)

            assert Bounded().fp8_quant_fwd_inp.amax_epsilon == 1e-3 and Bounded().fp8_quant_fwd_weight.amax_epsilon == 0
            assert Bounded() == Bounded() and Bounded.float8_current_scaling()


RECIPES = [cls for cls in vars(te_recipes).values() if isinstance(cls, type) and cls.__module__ == te_recipes.__name__ and not cls.__name__[0] == "_"]


def _made(cls: type) -> Any:
    return cls(qfactory=_none) if cls is te_recipes.CustomRecipe else cls()


def _none(role: Any) -> None:
    return None


@pytest.mark.parametrize("cls", RECIPES)
def test_a_value_that_a_recipe_cannot_have_raises_and_is_not_set(cls: type) -> None:
    recipe = _made(cls)
    for field in dataclasses.fields(recipe):
        if field.name in ("_derived", "fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad", "amax_compute_algo"):
            continue
        before = vars(recipe).copy()
        for wrong in ([], torch.ones(2)):
            with pytest.raises((ArgumentError, DTypeError)):
                setattr(recipe, field.name, wrong)
        assert vars(recipe) == before


@pytest.mark.parametrize("cls", RECIPES)
def test_what_follows_a_recipe_takes_it_as_it_is_at_that_moment(cls: type) -> None:
    recipe = _made(cls)
    plain = getattr(quantized, cls.__name__)
    assert isinstance(recipe, plain) and recipe == (plain(qfactory=_none) if cls is te_recipes.CustomRecipe else plain())
    fixed = recipe.immutable()
    assert fixed == recipe and hash(fixed) == hash(recipe.immutable()) and fixed.immutable() is fixed
    with pytest.raises(dataclasses.FrozenInstanceError):
        fixed.fp8_dpa = False
    context = fusible.autocast(recipe=recipe)
    recipe.name_of_a_script = "later"
    assert context.recipe == recipe and not hasattr(context.recipe, "name_of_a_script")
    if cls is not te_recipes.CustomRecipe:
        assert hash(fixed) == hash(plain()) and fusible.autocast(recipe=plain()).key == context.key


@pytest.mark.parametrize("cls", RECIPES)
def test_options_of_a_recipe_whose_class_is_made_of_other_arguments_may_be_set(cls: type) -> None:
    """As Megatron's is, of its configuration."""

    class Own(cls):  # type: ignore[valid-type,misc]
        def __init__(self, config: dict[str, Any]) -> None:
            self.config = config
            super().__init__(**config)

    config = {"qfactory": _none} if cls is te_recipes.CustomRecipe else {}
    for field in dataclasses.fields(cls):
        recipe = Own(config)
        setattr(recipe, field.name, getattr(recipe, field.name))
        assert vars(recipe) == vars(Own(config)), field.name
    recipe = Own(config)
    option, value = CHANGES.get(cls.__name__, ("quantization_alignment", lambda te: 64))
    setattr(recipe, option, value(sides()[1]))
    followed = getattr(fusible.autocast(recipe=recipe).recipe, option)
    assert recipe.config is config and followed == value(sides()[1]) != getattr(Own(config), option)


def test_what_older_versions_of_the_package_gave_delayed_scaling_is_taken() -> None:
    """The package takes any name, and makes nothing of it."""
    recipe: Any = None
    given: dict[str, Any] = {
        "margin": 0,
        "interval": 16,
        "amax_history_len": 16,
        "amax_compute_algo": "max",
        "override_linear_precision": (False, False, False),
    }
    with package():
        for te in sides():
            recipe = te.recipe.DelayedScaling(fp8_format=te.recipe.Format.HYBRID, **given)
            assert (recipe.amax_history_len, recipe.margin, recipe.fp8_format.name) == (16, 0, "HYBRID")
    assert recipe == quantized.DelayedScaling(amax_history_len=16) and pickle.loads(pickle.dumps(recipe)) == copy.copy(recipe) == recipe
    assert te_recipes.DelayedScaling(override_linear_precision=None) == te_recipes.DelayedScaling()
    wrong: Any
    for wrong, error in (({"interval": 0}, ArgumentError), ({"interval": "1"}, DTypeError), ({"margn": 1}, TypeError)):
        with pytest.raises(error):
            te_recipes.DelayedScaling(**wrong)
    for asked in (True, (False, False, True)):
        with pytest.raises(NotServedError, match="CustomRecipe"):
            te_recipes.DelayedScaling(override_linear_precision=asked)
