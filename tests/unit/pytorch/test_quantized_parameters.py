"""``quantize_parameters`` by a recipe: what is held, what products give, and that it is saved and loaded."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusible
from fusible import nvte, tex
from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.pytorch import LayerNorm, Linear, MixtureOfExperts, Sequential, ops, parameter_bytes, quantize_parameters
from fusible.pytorch.quantized_parameters import hold_parameters
from fusible.quantized import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8BlockwiseQTensor,
    Float8CurrentScaling,
    Float8Tensor,
    Format,
    HighPrecision,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4BlockScaling,
    NVFP4Tensor,
    QuantizedTensor,
    Recipe,
)
from fusible.tex import DType

RECIPES: dict[str, tuple[Recipe | None, type, float]] = {
    "none": (None, Float8Tensor, 1.0),
    "delayed": (DelayedScaling(), Float8Tensor, 1.0),
    "current": (Float8CurrentScaling(), Float8Tensor, 1.0),
    "mxfp8": (MXFP8BlockScaling(), MXFP8Tensor, 33 / 32),
    "block": (Float8BlockScaling(), Float8BlockwiseQTensor, 1.0 + 4 / 128**2),
    "nvfp4": (NVFP4BlockScaling(), NVFP4Tensor, 9 / 16),
}
"""Recipes, the class of what is held, and bytes an element without its one scale."""
INNER, OUTER = 384, 256


def layer(seed: int = 0, dtype: torch.dtype = torch.float32) -> Linear:
    torch.manual_seed(seed)
    return Linear(INNER, OUTER).to(dtype)


def held(module: nn.Module, name: str = "weight") -> Any:
    return dict(module.named_parameters())[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 24, 25, 64])
@pytest.mark.parametrize("name", RECIPES)
def test_products_are_those_of_the_values_that_are_held(name: str, rows: int, dtype: torch.dtype) -> None:
    """Within half a unit of the result's dtype, and what float32 loses over the sum of a product's terms, of which a block's scale is one more."""
    model = quantize_parameters(layer(dtype=dtype), recipe=RECIPES[name][0])
    x = torch.randn(rows, INNER, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        y = model(x)
    values, bias = held(model).dequantize(dtype=torch.float32).double(), held(model, "bias").double()
    want, size = x.double() @ values.t() + bias, x.double().abs() @ values.abs().t() + bias.abs()
    allowed = want.abs() * torch.finfo(dtype).eps / 2 + size * (INNER + 4) * torch.finfo(torch.float32).eps
    assert y.dtype is dtype and bool(((y.double() - want).abs() <= allowed).all())


@pytest.mark.parametrize("name", RECIPES)
def test_rows_alone_are_held(name: str) -> None:
    recipe, kind, size = RECIPES[name]
    model = layer()
    before = held(model).detach().clone()
    assert quantize_parameters(model, recipe=recipe) is model
    weight = held(model)
    assert type(weight) is kind and not weight.requires_grad and weight.get_usages() == {"rowwise": True, "columnwise": False}
    elements = INNER * OUTER
    assert size * elements <= parameter_bytes(model) - 4 * OUTER <= size * elements + 8
    # Less than half of the last bit of the format away, of a value no larger than its block's largest.
    step = 1 / 4 if name == "nvfp4" else 1 / 16
    assert bool(((weight.dequantize() - before).abs() <= step * before.abs() + before.abs().max() / (12 if name == "nvfp4" else 448)).all())


@pytest.mark.parametrize("name", RECIPES)
def test_states_are_saved_and_loaded(name: str) -> None:
    """The very bytes, by torch's own files without pickled classes of others; into a model that is held so, and into one in high precision."""
    recipe = RECIPES[name][0]
    model, x = quantize_parameters(Sequential(layer(), LayerNorm(OUTER)), recipe=recipe), torch.randn(3, INNER)
    memory = io.BytesIO()
    torch.save(model.state_dict(), memory)
    memory.seek(0)
    state = torch.load(memory, weights_only=True)
    other = quantize_parameters(Sequential(layer(seed=5), LayerNorm(OUTER)), recipe=recipe)
    other.load_state_dict(state)
    plain = Sequential(layer(seed=6), LayerNorm(OUTER))
    plain.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    first, second = (held(each, "0.weight").get_metadata() for each in (model, other))
    tensors = [key for key, value in first.items() if isinstance(value, Tensor)]
    assert tensors and all(torch.equal(first[key], second[key]) for key in tensors)
    assert torch.equal(held(plain, "0.weight"), held(model, "0.weight").dequantize())


@pytest.mark.parametrize("name", RECIPES)
def test_any_recipe_takes_them_as_they_are(name: str) -> None:
    model, x = quantize_parameters(layer(), recipe=RECIPES[name][0]), torch.randn(32, INNER)
    values = held(model).dequantize()
    for recipe in (Float8CurrentScaling(), MXFP8BlockScaling(), Float8BlockScaling()):
        with fusible.autocast(recipe=recipe), torch.no_grad():
            y = model(x)
        want = torch.nn.functional.linear(x, values, held(model, "bias"))
        assert (y - want).norm() <= want.norm() / 16  # E4M3's last bit, of the activations


def test_what_is_quantized_stays_and_what_is_shared_is_quantized_once() -> None:
    model = Sequential(layer(), LayerNorm(OUTER), layer(seed=1))
    quantize_parameters(model[0])
    first = held(model, "0.weight")
    quantize_parameters(model, recipe=MXFP8BlockScaling())
    assert held(model, "0.weight") is first and isinstance(held(model, "2.weight"), MXFP8Tensor)
    assert not isinstance(held(model, "1.weight"), QuantizedTensor)
    one, two = layer(), layer()
    two.weight = one.weight
    quantize_parameters(nn.ModuleList([one, two]), recipe=NVFP4BlockScaling())
    assert one.weight is two.weight and isinstance(one.weight, NVFP4Tensor)


@pytest.mark.parametrize("name", RECIPES)
def test_parts_of_a_grouped_weight(name: str) -> None:
    grouped = quantize_parameters(ops.GroupedLinear(3, 64, 96, bias=False), recipe=RECIPES[name][0])
    x, sizes = torch.randn(6, 64), [2, 1, 3]
    with torch.no_grad():
        y = grouped(x, torch.tensor(sizes))
    want = torch.cat([part @ held(grouped, f"weight{i}").dequantize().t() for i, part in enumerate(x.split(sizes))])
    torch.testing.assert_close(y, want, rtol=1e-5, atol=64 * torch.finfo(torch.float32).eps * 8)


GROUPS = (32, 96)
LAYERS: dict[str, Any] = {
    "alone": lambda: ops.Linear(INNER, OUTER),
    "behind a GELU": lambda: Sequential(ops.GELU(), ops.Linear(INNER, OUTER)),
    "experts in one": lambda: ops.GroupedLinear(len(GROUPS), INNER, OUTER, single_grouped_weight=True),
    "experts apart": lambda: ops.GroupedLinear(len(GROUPS), INNER, OUTER),
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["mxfp8", "block", "nvfp4"])
def test_rows_alone_give_the_gradient_of_x_by_their_values(name: str, recipe: str, layers: str) -> None:
    """As adapters behind and before them ask for it, under any recipe. dy has one magnitude, which every format has."""
    torch.manual_seed(0)
    model = quantize_parameters(ops.Sequential(LAYERS[layers]()), recipe=RECIPES[name][0])
    told = [line for line in model.explain(recipe=RECIPES[name][0]).splitlines() if ".weight" in line]
    assert told and all("rowwise=True, columnwise=False" in line for line in told), told
    x, dy = torch.randn(sum(GROUPS), INNER, requires_grad=True), 6 * torch.randint(0, 2, (sum(GROUPS), OUTER)).mul(2).sub(1).float()
    experts = layers.startswith("experts")
    chosen = RECIPES[recipe][0]
    with fusible.autocast(enabled=chosen is not None, recipe=chosen):
        model(x, *([torch.tensor(GROUPS)] if experts else [])).backward(dy)
    weights = [p.dequantize(dtype=torch.float32).double() for p in model.parameters() if isinstance(p, QuantizedTensor)]
    weights = [*weights[0]] if layers == "experts in one" else weights
    parts = dy.double().split(GROUPS if experts else [sum(GROUPS)])
    want, size = (torch.cat([f(part) @ f(w) for part, w in zip(parts, weights, strict=True)]) for f in (lambda t: t, torch.abs))
    if layers == "behind a GELU":
        at = x.detach().double().requires_grad_()
        nn.functional.gelu(at, approximate="tanh").sum().backward()
        want, size = want * at.grad, size * 2
    assert x.grad is not None and ((x.grad - want).abs() <= (OUTER + 8) * torch.finfo(torch.float32).eps * size).all()


@pytest.mark.parametrize("name", RECIPES)
def test_an_op_that_takes_a_buffer_keeps_it(name: str) -> None:
    """As the router of DeepSeek's models takes what balances the load of its experts."""
    experts = MixtureOfExperts(64, 64, 4, expert_bias=True, score_function="sigmoid")
    model = quantize_parameters(Sequential(Linear(64, 64), experts), recipe=RECIPES[name][0])
    assert isinstance(model[0].weight, QuantizedTensor) and experts.expert_bias.dtype is torch.float32
    with torch.no_grad():
        assert model(torch.randn(8, 64)).isfinite().all()


def test_the_format_of_one_scale_is_asked_for_by_its_type_or_by_a_recipe() -> None:
    assert held(quantize_parameters(layer(), DType.kFloat8E5M2))._fp8_dtype == DType.kFloat8E5M2
    for recipe in (DelayedScaling(fp8_format=Format.E4M3), Float8CurrentScaling(fp8_format=Format.HYBRID)):
        assert held(quantize_parameters(layer(), recipe=recipe))._fp8_dtype == DType.kFloat8E4M3
    made = quantize_parameters(layer(), recipe=CustomRecipe(qfactory=lambda role: MXFP8Quantizer(DType.kFloat8E5M2)))
    assert isinstance(held(made), MXFP8Tensor) and held(made).get_usages() == {"rowwise": True, "columnwise": False}


def test_a_module_that_was_called_holds_what_it_is_given_then() -> None:
    linear, other, x = layer(), layer(seed=1), torch.randn(4, INNER)
    quantize_parameters(other)
    with torch.no_grad():
        before = linear(x), linear(x), linear(x)
        hold_parameters(linear, {"weight": other.weight})
        assert not linear._runners, "they hold copies of the weights that are gone"
        linear.bias.copy_(other.bias)
        assert all(torch.equal(linear(x), other(x)) for _ in range(3)) and not torch.equal(before[0], linear(x))


def test_what_cannot_be_is_said_before_anything_is_changed() -> None:
    model = Sequential(Linear(64, 64), Linear(64, 24), Linear(24, 24))
    before = dict(model.named_parameters())
    with pytest.raises(ShapeError, match=r"^1\.weight: a tensor to quantize to MXFP8: expected rows and columns in multiples of 32, got \[24, 64\]"):
        quantize_parameters(model, recipe=MXFP8BlockScaling())
    with pytest.raises(ArgumentError, match="quantize_parameters: expected a recipe that quantizes weights, got"):
        quantize_parameters(model, recipe=HighPrecision())
    with pytest.raises(ArgumentError, match="quantize_parameters: expected a recipe that quantizes weights, got"):
        quantize_parameters(model, recipe=CustomRecipe(qfactory=lambda role: None))
    with pytest.raises(DTypeError, match="quantize_parameters: expected a recipe, got 'mxfp8'"):
        quantize_parameters(model, recipe="mxfp8")  # type: ignore[arg-type]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    with torch.no_grad():
        assert model(torch.randn(2, 64)).shape == (2, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RECIPES)
def test_what_calls_are_given_for_a_parameter_stands_for_its_dtype(name: str, dtype: torch.dtype) -> None:
    linear, calls = quantize_parameters(layer(dtype=dtype), recipe=RECIPES[name][0]), list[tex.RecordedCall]()
    with torch.no_grad(), tex.listening(calls.append):
        linear(torch.ones(32, INNER, dtype=dtype))
    given = [arg for call in calls for arg in call.args if isinstance(arg, nvte.STORAGES)]
    assert given and {arg.dequantize().dtype for arg in given} == {dtype}


def test_what_is_quantized_elsewhere_is_held_as_it_is() -> None:
    model, other = fusible.Linear(32, 32), fusible.Linear(32, 32)
    quantize_parameters(other)
    bias, weight = model.bias, other.weight.detach()
    hold_parameters(model, {"weight": weight})
    assert isinstance(model.weight, torch.nn.Parameter) and not model.weight.requires_grad and model.bias is bias and bias.requires_grad
    assert torch.equal(model.weight.dequantize(), weight.dequantize())
    other.bias = bias
    x = torch.randn(4, 32)
    with torch.no_grad():
        assert torch.equal(model(x), other(x))


def test_the_weight_of_a_product_that_is_a_buffer_stays_as_it_is() -> None:
    model = fusible.Linear(32, 32)
    weight = model.weight.detach().clone()
    del model._parameters["weight"]
    model.register_buffer("weight", weight)
    quantize_parameters(model)
    assert model.weight is weight
    with torch.no_grad():
        assert model(torch.randn(4, 32)).isfinite().all()
