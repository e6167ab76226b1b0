"""Names of layers, by which the function of a ``CustomRecipe`` tells them apart: the package's, and ours under its names."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from te_client import package
from te_public import Side, sides

from fusible import quantized
from fusible.distributed import gather_quantized
from fusible.pytorch import quantize_parameters

WIDTH, PRODUCTS = 32, ("linear", "grouped_linear")

LAYERS: dict[str, tuple[Callable[..., Any], Callable[[Any, torch.Tensor], Any]]] = {
    "Linear": (lambda te, **o: te.Linear(WIDTH, WIDTH, **o), lambda layer, x: layer(x)),
    "Linear in parts": (lambda te, **o: te.Linear(WIDTH, 2 * WIDTH, parameters_split=("a", "b"), **o), lambda layer, x: layer(x)),
    "LayerNormLinear": (lambda te, **o: te.LayerNormLinear(WIDTH, WIDTH, **o), lambda layer, x: layer(x)),
    "LayerNormMLP": (lambda te, **o: te.LayerNormMLP(WIDTH, WIDTH, **o), lambda layer, x: layer(x)),
    "GroupedLinear": (lambda te, **o: te.GroupedLinear(2, WIDTH, WIDTH, **o), lambda layer, x: layer(x.flatten(0, 1), [32, 32])),
    "DotProductAttention": (lambda te, **o: te.DotProductAttention(2, 16, **{"name": o.get("name")}), lambda layer, x: layer(x, x, x)),
    "MultiheadAttention": (lambda te, **o: te.MultiheadAttention(WIDTH, 2, **o), lambda layer, x: layer(x)),
    "MultiheadAttention after a norm": (lambda te, **o: te.MultiheadAttention(WIDTH, 2, input_layernorm=True, **o), lambda layer, x: layer(x)),
    "MultiheadAttention, cross": (
        lambda te, **o: te.MultiheadAttention(WIDTH, 2, attention_type="cross", **o),
        lambda layer, x: layer(x, encoder_output=x),
    ),
    "TransformerLayer": (lambda te, **o: te.TransformerLayer(WIDTH, WIDTH, 2, **o), lambda layer, x: layer(x)),
    "TransformerLayer, decoder": (
        lambda te, **o: te.TransformerLayer(WIDTH, WIDTH, 2, layer_type="decoder", **o),
        lambda layer, x: layer(x, encoder_output=x),
    ),
}  # fmt: skip


def _input() -> torch.Tensor:
    return torch.randn(32, 2, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()


def _first(te: Side) -> int:
    """The number of the next layer without a name."""
    return int(te.Linear(1, 1).name.removeprefix("Layer_")) + 1


def _names(layer: Any, first: int) -> list[str]:
    """Of the layer and those in it; layers without a name are counted from ``first``."""
    found = [module.name for module in layer.modules() if hasattr(module, "name")]
    for number in range(first, first + len(found)):
        found = [name.replace(f"Layer_{number}", f"Layer_{number - first}") for name in found]
    return found


def _asked(te: Side, layer: Any, call: Callable[[Any, torch.Tensor], Any]) -> set[tuple[str, str, str]]:
    """The roles of operands of products that a step asks a recipe's function for."""
    seen = set[tuple[str, str, str]]()

    def factory(role: Any) -> Any:
        if role is not None and role.module_type in PRODUCTS:
            seen.add((role.module_type, role.tensor_type, re.sub(r"(?<=Layer_)\d+", "n", role.name)))
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cuda")

    with te.autocast(recipe=te.recipe.CustomRecipe(qfactory=factory)):
        y = call(layer, _input())
    (y[0] if isinstance(y, tuple) else y).float().sum().backward()
    return seen


@pytest.mark.parametrize("given", [{}, {"name": "outer"}], ids=["unnamed", "named"])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_have_the_names_that_the_package_gives_them(layer: str, given: dict[str, str]) -> None:
    made, _ = LAYERS[layer]
    with package():
        theirs, ours = ((_first(te), made(te, params_dtype=torch.bfloat16, device="cuda", **given)) for te in sides())
        assert _names(theirs[1], theirs[0]) == _names(ours[1], ours[0])


@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "DotProductAttention"])
def test_a_custom_recipe_is_asked_for_tensors_by_the_names_of_their_layers(layer: str) -> None:
    made, call = LAYERS[layer]
    with package():
        theirs, ours = (_asked(te, made(te, params_dtype=torch.bfloat16, device="cuda", name="outer"), call) for te in sides())
    assert ours == theirs and all(name.startswith(("outer", "Layer_n")) for *_, name in ours)


def _joined(layer: str) -> dict[str, bool]:
    return {"fuse_qkv_params": True} if layer.startswith(("Multihead", "Transformer")) else {}


HELD = [name for name in LAYERS if name not in ("Linear in parts", "DotProductAttention")]
"""Those whose products have one weight each, where q, k and v are one."""


@pytest.mark.parametrize("layer", HELD)
def test_weights_are_held_as_a_custom_recipe_says_by_the_names_of_their_layers(layer: str) -> None:
    ours, (made, _) = sides()[1], LAYERS[layer]
    asked = set[str]()

    def factory(role: Any) -> Any:
        asked.add(role.name)
        return None if role.name.endswith(("proj", "fc2")) else ours.Float8CurrentScalingQuantizer(ours.DType.kFloat8E4M3, device="cuda")

    with ours.quantized_model_init(recipe=ours.recipe.CustomRecipe(qfactory=factory)):
        module = made(ours, params_dtype=torch.bfloat16, device="cuda", name="outer", **_joined(layer))
    held = {name for name, parameter in module.named_parameters() if isinstance(parameter, ours.QuantizedTensor)}
    weights = {name for name, parameter in module.named_parameters() if parameter.dim() == 2}
    assert held == {name for name in weights if not name.endswith(("proj.weight", "fc2_weight"))}
    assert len(asked) == len(weights) // (2 if layer == "GroupedLinear" else 1), "each product has a name of its own"


def _by_role(role: Any) -> Any:
    """Nothing for some layers, MXFP8 for groups, and else a scale for a tensor."""
    if role.name.endswith(("proj", "fc2")):
        return None
    return quantized.MXFP8Quantizer(FORMAT) if role.module_type == "grouped_linear" else quantized.Float8CurrentScalingQuantizer(FORMAT)


KINDS: dict[type, type] = {quantized.MXFP8Tensor: quantized.MXFP8Quantizer, quantized.Float8Tensor: quantized.Float8CurrentScalingQuantizer}
FORMAT = quantized.Float8CurrentScaling().fp8_format.forward


@pytest.mark.parametrize("layer", HELD)
def test_weights_that_are_quantized_later_are_so_by_their_roles(layer: str) -> None:
    ours, (made, call), recipe = sides()[1], LAYERS[layer], quantized.CustomRecipe(_by_role)
    torch.manual_seed(0)
    module = made(ours, params_dtype=torch.bfloat16, device="cuda", name="outer", **_joined(layer)).eval()
    weights = {name for name, parameter in module.named_parameters() if parameter.dim() == 2}
    left = {name for name in weights if name.endswith(("proj.weight", "fc2_weight"))}
    kind = quantized.MXFP8Tensor if layer == "GroupedLinear" else quantized.Float8Tensor

    def result() -> torch.Tensor:
        with torch.no_grad(), ours.autocast(recipe=recipe):
            y = call(module, _input().detach())
        return y[0] if isinstance(y, tuple) else y

    before = result()
    gathered = gather_quantized(copy.deepcopy(module), recipe)
    assert {
        name for name, each in gathered.named_parameters() if isinstance(getattr(each, "_quantizer", None), quantized.Quantizer)
    } == weights - left
    assert {type(each._quantizer) for name, each in gathered.named_parameters() if name in weights - left} == {KINDS[kind]}
    quantize_parameters(module, recipe=recipe)
    assert {name for name, each in module.named_parameters() if isinstance(each, kind)} == weights - left
    assert torch.equal(result(), before)


def test_a_product_that_a_custom_recipe_leaves_out_by_name_is_computed_as_without_it() -> None:
    ours = sides()[1]
    torch.manual_seed(0)
    layer = ours.LayerNormMLP(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="cuda", name="mlp")

    def by(*quantized: str) -> list[torch.Tensor]:
        def factory(role: Any) -> Any:
            return ours.Float8CurrentScalingQuantizer(ours.DType.kFloat8E4M3, device="cuda") if role.name in quantized else None

        layer.zero_grad()
        x = _input()
        with ours.autocast(recipe=ours.recipe.CustomRecipe(qfactory=factory)):
            y = layer(x)
        y.float().sum().backward()
        return [y, layer.fc2_weight.grad.clone()]

    plain, first, second = by(), by("mlp.fc1"), by("mlp.fc2")
    assert all(not torch.equal(one, other) for one, other in ((plain[0], first[0]), (plain[0], second[0]), (first[0], second[0])))
    layer.name = "another"
    assert all(map(torch.equal, by("mlp.fc1", "mlp.fc2"), plain)), "a name that is set later holds from then on"
    assert all(map(torch.equal, by("another.fc2"), second))
