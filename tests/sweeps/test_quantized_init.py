"""Within ``quantized_model_init`` every module and operation holds the weights of its products as the recipe quantizes them, and trains them; after
``quantize_parameters`` it holds them so, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from subjects import MODULES, OPERATIONS, Subject
from torch import distributed, nn

import fusible
from fusible.pytorch.product_weights import weights_of_products
from fusible.pytorch.quantized_init import quantized_model_init
from fusible.quantized import QuantizedTensor

RECIPES = {"delayed": fusible.DelayedScaling(), "mxfp8": fusible.MXFP8BlockScaling()}
COLLECTIVE = {"AllGather", "AllReduce", "ReduceScatter"}
"""What has no weights, and is made in a process group."""
SUBJECTS = [subject for subject in (*MODULES, *OPERATIONS) if subject.name not in COLLECTIVE or distributed.is_initialized()]


def left(model: nn.Module) -> list[str]:
    """The weights of products that are in high precision."""
    return [weight.own for module in model.modules() if hasattr(module, "local_ops") for weight in _weights(module)]


def _weights(module: Any) -> list[Any]:
    return list(weights_of_products(module.local_ops(), module._parameters, module.shares))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("subject", SUBJECTS, ids=[f"{i} {subject.name}" for i, subject in enumerate(SUBJECTS)])
def test_no_weight_of_a_product_is_left_in_high_precision(subject: Subject, recipe: str) -> None:
    plain = subject.make()
    with quantized_model_init(recipe=RECIPES[recipe]):
        model = subject.make()
    held = [p for p in model.parameters() if isinstance(p, QuantizedTensor)]
    assert not left(model) and len(held) == len(left(plain)), left(model)
    if not held:
        return
    arguments = subject.arguments()
    if "cache" in arguments:  # which is for inference
        model.requires_grad_(False)
    with fusible.autocast(recipe=RECIPES[recipe]):
        result = subject.call(model, arguments)
    for y in result if isinstance(result, tuple) else (result,):
        if isinstance(y, torch.Tensor) and y.requires_grad:
            y.square().sum().backward(retain_graph=True)
    assert all((p.grad is not None) is p.requires_grad for p in held)


def test_what_has_such_weights_is_known() -> None:
    assert {"Linear", "GroupedLinear", "MixtureOfExperts"} <= {subject.name for subject in SUBJECTS if left(subject.make())}


@pytest.mark.parametrize("subject", SUBJECTS, ids=[f"{i} {subject.name}" for i, subject in enumerate(SUBJECTS)])
def test_none_is_left_by_quantize_parameters(subject: Subject) -> None:
    """And a pass is what it is on the values that are held."""
    model = fusible.quantize_parameters(subject.make(), recipe=RECIPES["mxfp8"])
    assert not left(model)
    with torch.no_grad():
        result = subject.call(model, subject.arguments())
    for y in result if isinstance(result, tuple) else (result,):
        assert not isinstance(y, torch.Tensor) or not y.is_floating_point() or y.isfinite().all()
