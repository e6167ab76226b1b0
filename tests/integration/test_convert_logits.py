"""``fusible.convert`` on families of transformers' models: the numbers of a call, against transformers itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from convert_families import BY_NAME, OPERAND, RECIPES, Family, every_family, logits

import fusible


def relative(y: torch.Tensor, reference: torch.Tensor) -> float:
    """The relative error of the median token: of experts whose logits are near, rounding may choose the other, and that token is another one then."""
    y, reference = y.double(), reference.double()
    return float(((y - reference).norm(dim=-1) / reference.norm(dim=-1)).median())


def recipe_bound(model: Any, recipe: str) -> float:
    """Rounding is uniform in its interval, so an operand's relative error has a deviation of its largest over sqrt 3; a product has two operands; and
    the errors of the products, each of which adds to the residual stream no more than that already holds, are independent."""
    products = sum(2 if layer.kind == "expert stack" else layer.kind == "linear" for layer in fusible.conversion_report(model).converted)
    return math.sqrt(2 * products) * OPERAND[recipe] / math.sqrt(3)


@every_family
def test_the_logits_in_fp32_are_those_of_transformers(family: Family) -> None:
    model, inputs = family.make(), family.inputs()
    reference = logits(model, inputs)
    assert logits(fusible.convert(model), inputs).sub(reference).abs().max() < 1e-5
    report = fusible.conversion_report(model)
    assert any(layer.kind == "linear" for layer in report.converted) and any(layer.kind == "norm" for layer in report.converted)
    assert {layer.kind for layer in report.left} <= {"activation", "attention"}  # an erf, and what is eager by default
    assert torch.equal(logits(fusible.convert(model, undo=True), inputs), reference)


@every_family
def test_the_logits_in_bf16_are_as_near_to_fp32_as_those_of_transformers(family: Family) -> None:
    inputs, rounded = family.inputs(), family.inputs(dtype=torch.bfloat16)
    model = family.make(dtype=torch.bfloat16)
    reference = logits(family.make().bfloat16().float(), inputs)
    y = logits(fusible.convert(model), rounded)
    assert y.dtype is torch.bfloat16
    # Between two norms some ten tensors are rounded, in each of the two layers thrice, by 2^-9 at most each.
    assert relative(y, reference) < math.sqrt(60) * 2.0**-9


@every_family
def test_the_logits_of_fusibles_own_pipelines_in_fp32_are_those_of_transformers(family: Family) -> None:
    model, inputs = family.make(), family.inputs()
    reference = logits(model, inputs)
    fusible.convert(model, fusible.HighPrecision("float32"))  # products by Fusible, too, all that is fused included
    assert logits(model, inputs).sub(reference).abs().max() < 1e-5


def check_recipe(family: Family, name: str) -> None:
    model, inputs = family.make(), family.inputs()
    reference = logits(model, inputs)
    fusible.convert(model, RECIPES[name])
    model.train()  # delayed scaling looks at a training iteration first
    model(**inputs).loss.backward()
    y = logits(model.eval(), inputs)
    bound = recipe_bound(model, name)
    assert 2.0**-10 < relative(y, reference) < bound
    with fusible.autocast(enabled=False):
        assert logits(model, inputs).sub(reference).abs().max() < 1e-5


@every_family
def test_the_logits_under_delayed_scaling_are_within_the_error_of_its_operands(family: Family) -> None:
    check_recipe(family, "delayed")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "delayed"])
@every_family
def test_the_logits_in_each_recipe_are_within_the_error_of_its_operands(family: Family, recipe: str) -> None:
    check_recipe(family, recipe)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "delayed"])
def test_the_logits_of_llama_in_each_recipe(recipe: str) -> None:
    check_recipe(BY_NAME["llama"], recipe)
