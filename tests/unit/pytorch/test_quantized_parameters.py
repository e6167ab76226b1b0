"""``quantize_parameters`` by a recipe: what weights are held in, and what a model of theirs computes."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest
import torch
from torch import nn

import fusible
from fusible.errors import ArgumentError, ShapeError
from fusible.quantized import QuantizedTensor
from fusible.tex import DType

RECIPES: Mapping[str, fusible.Recipe] = {
    "delayed": fusible.DelayedScaling(),
    "current": fusible.Float8CurrentScaling(),
    "block": fusible.Float8BlockScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(),
    "nvfp4, rows": fusible.NVFP4BlockScaling(disable_2d_quantization=True),
}
BITS = {"nvfp4": 4.6, "nvfp4, rows": 4.6} | dict.fromkeys(("delayed", "current", "block", "mxfp8"), 8.4)
"""At most, an element: of blocks with their scales and what pads these."""


def made(width: int = 256) -> fusible.Sequential:
    torch.manual_seed(0)
    return fusible.Sequential(fusible.RMSNorm(width), fusible.Linear(width, 2 * width), fusible.SwiGLU(), fusible.Linear(width, width, bias=False))


def values_of(model: nn.Module) -> fusible.Sequential:
    """The same model with the weights' values in fp32."""
    plain = made()
    held = {name: p.dequantize(dtype=torch.float32) if isinstance(p, QuantizedTensor) else p for name, p in model.named_parameters()}
    plain.load_state_dict(held)
    return plain


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_model_computes_with_the_values_that_are_held(name: str, rows: int) -> None:
    model, x = fusible.quantize_parameters(made(), recipe=RECIPES[name]), torch.randn(rows, 256)
    weights = [p for p in model.parameters() if p.dim() == 2]
    assert len(weights) == 2 and all(isinstance(p, QuantizedTensor) and not p.requires_grad for p in weights)
    with torch.no_grad():
        found, wanted = model(x), values_of(model)(x)
    # Products of fp32 activations are summed up in fp32, of 256 terms.
    torch.testing.assert_close(found, wanted, rtol=0, atol=256**0.5 * 2.0**-22 * wanted.abs().max().item())


@pytest.mark.parametrize("name", RECIPES)
def test_the_values_are_near_by_the_format(name: str) -> None:
    before = {key: p.detach() for key, p in made().named_parameters()}
    step = 2.0**-2 if name.startswith("nvfp4") else 2.0**-4  # half a unit of E2M1's and E4M3's mantissas
    for key, p in fusible.quantize_parameters(made(), recipe=RECIPES[name]).named_parameters():
        if isinstance(p, QuantizedTensor):
            assert 0 < (p.dequantize() - before[key]).norm() < step * before[key].norm()
            assert p.get_usages() == {"rowwise": True, "columnwise": False}
            bits = 8 * fusible.parameter_bytes(nn.ParameterList([p])) / p.numel()
            assert bits < BITS[name]


@pytest.mark.parametrize("name", RECIPES)
def test_a_state_dict_brings_them_back(name: str) -> None:
    model, x = fusible.quantize_parameters(made(), recipe=RECIPES[name]), torch.randn(5, 256)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = fusible.quantize_parameters(made(), recipe=RECIPES[name])
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(torch.randn(p.shape))
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(other(x), model(x))


def test_each_is_quantized_once_and_another_recipe_leaves_it() -> None:
    model = fusible.quantize_parameters(made(), recipe=fusible.MXFP8BlockScaling())
    held = [id(p) for p in model.parameters()]
    fusible.quantize_parameters(model, recipe=fusible.Float8BlockScaling())
    assert [id(p) for p in model.parameters()] == held


def test_the_element_type_is_the_recipes() -> None:
    model = fusible.quantize_parameters(made(), recipe=fusible.Float8CurrentScaling(fp8_format=fusible.Format.E4M3))
    assert {p._fp8_dtype for p in model.parameters() if isinstance(p, QuantizedTensor)} == {DType.kFloat8E4M3}
    old = fusible.quantize_parameters(made(), DType.kFloat8E5M2)
    assert {p._fp8_dtype for p in old.parameters() if isinstance(p, QuantizedTensor)} == {DType.kFloat8E5M2}


def test_what_cannot_be_held_so_is_one_sentence_and_changes_nothing() -> None:
    model = made(40)
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ShapeError, match="expected .*32"):
        fusible.quantize_parameters(model, recipe=fusible.MXFP8BlockScaling())
    with pytest.raises(ArgumentError, match="quantize_parameters: expected a recipe that quantizes weights, got HighPrecision"):
        fusible.quantize_parameters(model, recipe=fusible.HighPrecision())
    assert {name: id(p) for name, p in model.named_parameters()} == before
