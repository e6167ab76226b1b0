"""Recipes and what they make of each slot of a layer, against those of NVIDIA's Python package: defaults, and quantizers attribute by attribute."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from te_client import package

from fusible import quantized
from fusible.knobs import KNOBS
from fusible.quantized import Format, MMParams, QParams, QuantizerRole, RecipeState

NAMES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe")
SCOPES = ("none", "weights", "activations", "all")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "DelayedScaling": [{}, {"fp8_format": "E4M3", "amax_history_len": 3}],
    "Float8CurrentScaling": [{}, {"use_power_2_scales": True}, {"fp8_format": "E4M3"}],
    "Float8BlockScaling": [
        {},
        {"fp8_format": "HYBRID"},
        {"w_block_scaling_dim": 1},
        {"w_block_scaling_dim": 1, "x_block_scaling_dim": 2},
        {"w_block_scaling_dim": 1, "grad_block_scaling_dim": 2},
    ],
    "MXFP8BlockScaling": [{}, {"enable_2d_quantization": True}, {"fp8_format": "HYBRID", "enable_2d_quantization": True}],
    "NVFP4BlockScaling": [{}, {"disable_rht": True}, {"disable_stochastic_rounding": True}, {"disable_2d_quantization": True}]
    + [{"row_scaled_activation": True}]
    + [{"nvfp4_4over6": scope, "nvfp4_4over6_e4m3_use_256": bound, "disable_rht": True} for scope in SCOPES for bound in SCOPES]
    + [{"nvfp4_4over6": "weights", "nvfp4_4over6_err_mode": "MSE"}],
}
CASES = [pytest.param(name, options, id=f"{name}-{i}") for name, variants in OPTIONS.items() for i, options in enumerate(variants)]
FORWARD, BACKWARD = ("input", "weight", "output"), ("grad_output", "grad_input")


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    with package():
        yield importlib.import_module("transformer_engine.pytorch.quantization")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KNOBS:
        if name.startswith("NVTE_"):
            monkeypatch.delenv(name, raising=False)


def recipe(module: Any, name: str, options: dict[str, Any]) -> Any:
    options = {key: getattr(module.Format, value) if key == "fp8_format" else value for key, value in options.items()}
    return getattr(module, name)(**options)


def plain(value: Any) -> Any:
    """What two values of the packages have in common: an enum's name, the options of their dataclasses, a type's code."""
    if isinstance(value, Enum) and not isinstance(value, int):
        return value.name
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value


def common_recipes() -> Any:
    return importlib.import_module("transformer_engine.common.recipe")


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_the_same_options_with_the_same_defaults(name: str) -> None:
    given = [max] if name == "CustomRecipe" else []
    other, ours = getattr(common_recipes(), name)(*given), getattr(quantized, name)(*given)
    per_tensor = [f"{bits}_quant_{kind}" for bits in ("fp8", "fp4") for kind in ("fwd_inp", "fwd_weight", "bwd_grad")]
    names = [field.name for field in fields(other)] + [name for name in per_tensor if hasattr(other, name)]
    assert {n: plain(getattr(ours, n)) for n in names} == {n: plain(getattr(other, n)) for n in names}
    assert {field.name for field in fields(ours)} <= {*names, "_derived"}
    for predicate in ("delayed", "float8_current_scaling", "float8_per_tensor_scaling", "float8_block_scaling", "mxfp8", "nvfp4", "custom"):
        assert getattr(ours, predicate)() == getattr(other, predicate)() == getattr(type(ours), predicate)(), predicate


def test_formats_parameters_roles_and_requests_are_the_same(theirs: Any) -> None:
    common = common_recipes()
    assert {f.name: tuple(f.value) for f in Format} == {f.name: tuple(f.value) for f in common.Format}
    assert Format.HYBRID.value.max_bwd == common.Format.HYBRID.value.max_bwd
    for ours, other in ((MMParams, common.MMParams), (QParams, common.QParams), (quantized.DelayedScalingRequest, theirs.DelayedScalingRequest)):
        assert [f.name for f in fields(ours)] == [f.name for f in fields(other)]
        assert {k: plain(v) for k, v in plain(ours()).items()} == {k: plain(v) for k, v in plain(other()).items()}
    for role in ((), ("linear",), ("linear", "weight", "qkv"), ("", "input")):
        assert str(QuantizerRole(*role)) == str(theirs.QuantizerRole(*role))


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_padded_to_the_same_multiple(theirs: Any, name: str) -> None:
    given = {"qfactory": max, "quantization_alignment": 48} if name == "CustomRecipe" else {}
    found = quantized.get_align_size_for_quantization(getattr(quantized, name)(**given))
    assert found == theirs.get_align_size_for_quantization(getattr(common_recipes(), name)(**given))


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert type(mine).__name__ == type(other).__name__
        assert {*vars(mine)} <= {*vars(other), "device"}, "an attribute that nobody sets there"
        for name, value in vars(other).items():
            found = getattr(mine, name)
            if isinstance(value, torch.Tensor):
                assert found.dtype == value.dtype and torch.equal(found.reshape(value.shape), value), name
            else:
                assert found == value, name


def roles(kind: Any, tensor_types: tuple[str, ...], module_type: str) -> list[Any]:
    return [kind(module_type, tensor_type, "fc1") for tensor_type in tensor_types]


@pytest.mark.parametrize("module_type", [None, "linear", "grouped_linear", "dpa", ""])
@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_slot_is_quantized_the_same_way(theirs: Any, name: str, options: dict[str, Any], mode: str, module_type: str | None) -> None:
    tensor_types = FORWARD if mode == "forward" else BACKWARD
    found: list[list[Any]] = []
    for module, state, kind in ((quantized, RecipeState, QuantizerRole), (common_recipes(), theirs.RecipeState, theirs.QuantizerRole)):
        given = None if module_type is None else roles(kind, tensor_types[::-1], module_type)
        count = 5 if given is None else len(given)
        created = state.create(recipe(module, name, options), mode=mode, num_quantizers=count, device="cpu", roles=given)
        found.append(created.make_quantizers())
    assert_same(*found)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_positions_say_what_roles_leave_open(theirs: Any, name: str, options: dict[str, Any]) -> None:
    found: list[list[Any]] = []
    for module, state, kind in ((quantized, RecipeState, QuantizerRole), (common_recipes(), theirs.RecipeState, theirs.QuantizerRole)):
        given = [None, kind("linear"), kind("dpa", "qkv"), kind("linear", "weight"), None]
        created = state.create(recipe(module, name, options), mode="forward", num_quantizers=5, device="cpu", roles=given)
        found.append(created.make_quantizers())
    assert_same(*found)


def test_a_factory_may_mix_what_has_state_with_what_has_none(theirs: Any) -> None:
    tensors = importlib.import_module("transformer_engine.pytorch.tensor")
    found: list[list[Any]] = []
    seen: list[list[str]] = []
    for module, quantizers, state, kind in (
        (quantized, quantized, RecipeState, QuantizerRole),
        (theirs, tensors, theirs.RecipeState, theirs.QuantizerRole),
    ):
        asked: list[str] = []

        def factory(role: Any, asked: list[str] = asked, module: Any = module, quantizers: Any = quantizers) -> Any:
            asked.append(str(role))
            if role is None or role.tensor_type == "weight":
                return module.DelayedScalingRequest(amax_history_len=4)
            return quantizers.MXFP8Quantizer(8, rowwise=True, columnwise=False)

        given = [None, kind("linear", "input"), kind("linear", "weight", "proj")]
        common = quantized if module is quantized else common_recipes()
        created: Any = state.create(common.CustomRecipe(factory), mode="backward", num_quantizers=3, device="cpu", roles=given)
        found.append(created.make_quantizers())
        seen.append(asked)
        assert created.scale.shape == (2,) and created.amax_history.shape == (4, 2)
    assert seen[0] == seen[1] == ["None", "module_type=linear|tensor_type=input", "module_type=linear|tensor_type=weight|name=proj"]
    assert_same(*found)
