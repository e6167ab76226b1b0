"""``Linear(high_precision=True)``: a layer of a pipeline that no recipe quantizes is that layer called alone, outside of the recipe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fusible import autocast
from fusible.pytorch import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    HighPrecision,
    LayerNorm,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Sequential,
    quantize_parameters,
    quantized_model_init,
)
from fusible.quantized import QuantizedTensor

WIDTH, TOKENS, STEPS = 32, 64, 3
RECIPES: list[Recipe] = [
    DelayedScaling(),
    Float8CurrentScaling(),
    Float8CurrentScaling(backward_override="high_precision"),
    MXFP8BlockScaling(),
    MXFP8BlockScaling(backward_override="dequantized"),
    Float8BlockScaling(),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
    HighPrecision(),
]


def layers() -> list[nn.Module]:
    """A norm stands between each two products, so that no edge between them is quantized: in parts the model is what it is as a whole."""
    torch.manual_seed(0)
    first, last = (Linear(WIDTH, WIDTH, high_precision=True) for _ in range(2))
    return [first, LayerNorm(WIDTH), Linear(WIDTH, WIDTH), LayerNorm(WIDTH), last]


def train(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], activation: torch.dtype) -> list[torch.Tensor]:
    """What ``STEPS`` steps give: outputs and gradients, and an inference's output at the end."""
    found = []
    for step in range(STEPS):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).to(activation).requires_grad_()
        model.zero_grad()
        y = call(x)
        (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        found += [y, x.grad, *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]
    with torch.no_grad():
        return [*found, call(x)]


@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_it_is_what_a_layer_under_autocast_switched_off_computes(recipe: Recipe, activation: torch.dtype) -> None:
    whole, parts = Sequential(*layers()), nn.ModuleList(layers())
    middle = Sequential(*parts[1:4])

    def as_a_whole(x: torch.Tensor) -> torch.Tensor:
        with autocast(recipe=recipe):
            return whole(x)

    def in_parts(x: torch.Tensor) -> torch.Tensor:
        with autocast(recipe=recipe):
            with autocast(enabled=False):
                x = parts[0](x)
            x = middle(x)
            with autocast(enabled=False):
                return parts[4](x)

    one, other = train(whole, as_a_whole, activation), train(parts, in_parts, activation)
    assert len(one) == len(other) == STEPS * (2 + 10) + 1
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("recipe", [r for r in RECIPES if not r.high_precision()], ids=repr)
def test_the_other_layer_is_quantized_all_the_same(recipe: Recipe) -> None:
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    with autocast(recipe=recipe):
        passes = Sequential(*layers()).explain(x).splitlines()
    shown = [line for line in passes[passes.index("forward") : passes.index("backward")] if "MMT" in line]
    assert [("MMT(weight bf16)" in line, "e4m3" in line or "e2m1" in line) for line in shown] == [(True, False), (False, True), (True, False)]


def test_its_scaling_has_no_state_and_its_weight_is_never_held_in_8_bits() -> None:
    model = Sequential(*layers())
    with autocast(recipe=DelayedScaling()):
        model(torch.randn(TOKENS, WIDTH))
    assert {slot.split(".")[0] for slot in model._runner().pipeline.state.forward} == {"3"}
    with quantized_model_init(recipe=Float8CurrentScaling()):
        made = Sequential(*layers())
    for held in (made, quantize_parameters(model)):
        weights = [layer.weight for layer in held if isinstance(layer, Linear)]
        assert [isinstance(weight, QuantizedTensor) for weight in weights] == [False, True, False]


def test_it_is_shown() -> None:
    assert repr(Linear(2, 3, high_precision=True)).startswith("Linear(in_features=2, out_features=3, bias=True, high_precision=True)")
    assert "high_precision" not in repr(Linear(2, 3))
