"""Our modules by NVIDIA's names against NVIDIA's own on the same weights, under each recipe: outputs, gradients and state dicts."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from te_client import package
from te_twins import RECIPES, Twin, compare

from fusible.compat import te_modules
from fusible.errors import ArgumentError, DTypeError, NotServedError

TWINS = {
    "Linear": Twin("Linear", (128, 256), {}),
    "Linear without bias": Twin("Linear", (128, 256), {"bias": False}),
    "Linear that gives its bias": Twin("Linear", (128, 256), {"return_bias": True}),
    "Linear in parts": Twin("Linear", (128, 192), {"parameters_split": {"query_": 128, "key": 64}}),
    "LayerNorm": Twin("LayerNorm", (128,), {"eps": 1e-3}, 0),
    "RMSNorm": Twin("RMSNorm", (128,), {"zero_centered_gamma": True}, 0),
    "LayerNormLinear": Twin("LayerNormLinear", (128, 256), {"zero_centered_gamma": True}),
    "LayerNormLinear that gives both": Twin(
        "LayerNormLinear", (128, 256), {"normalization": "RMSNorm", "return_bias": True, "return_layernorm_output": True}
    ),
    "LayerNormLinear in parts": Twin("LayerNormLinear", (128, 256), {"parameters_split": ("gate", "up"), "bias": False}),
    "LayerNormMLP": Twin("LayerNormMLP", (128, 256), {}, 2),
    "LayerNormMLP of SwiGLU": Twin("LayerNormMLP", (128, 256), {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}, 2),
    "LayerNormMLP that gives all": Twin("LayerNormMLP", (128, 256), {"return_bias": True, "return_layernorm_output": True, "activation": "relu"}, 2),
    "LayerNormMLP with options": Twin("LayerNormMLP", (128, 256), {"activation": "clamped_swiglu", "activation_params": {"limit": 2.0}}, 2),
}
CLASSES = [name for name in te_modules.__all__ if hasattr(getattr(te_modules, name), "forward") and name != "TransformerEngineBaseModule"]


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te, warnings.catch_warnings():
        yield te


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", TWINS)
def test_a_module_computes_what_nvidias_does(te: Any, name: str, recipe: str) -> None:
    compare(te, TWINS[name], recipe)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_nvidias_arguments(te: Any, name: str) -> None:
    for method in ("__init__", "forward"):
        wanted, found = (inspect.signature(getattr(getattr(made, name), method)) for made in (te, te_modules))
        if any(p.kind is p.VAR_POSITIONAL for p in wanted.parameters.values()):
            continue  # an operation's forward takes what there is
        assert [(p.name, p.default, p.kind) for p in found.parameters.values()] == [(p.name, p.default, p.kind) for p in wanted.parameters.values()]


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_new_weights_are_drawn_as_nvidias(te: Any, name: str) -> None:
    made = []
    for made_of in (te, te_modules):
        torch.manual_seed(4)
        made.append(getattr(made_of, name)(64, 128, params_dtype=torch.bfloat16).state_dict())
    for key, value in made[0].items():
        assert torch.equal(made[1][key], value), key
    marks = [{key: vars(p) for key, p in getattr(made_of, name)(64, 128).named_parameters()} for made_of in (te, te_modules)]
    for key, attributes in marks[0].items():
        assert {mark: value for mark, value in attributes.items() if "parallel" in mark or "partition" in mark} == marks[1][key], key


def test_a_weight_on_the_meta_device_is_made_later(te: Any) -> None:
    module = te_modules.LayerNormMLP(64, 128, device="meta")
    assert all(parameter.is_meta for parameter in module.parameters())
    module.reset_parameters()
    y = module(torch.randn(4, 64))
    assert y.isfinite().all() and y.count_nonzero()


def test_parameters_and_input_are_of_one_type_or_torchs_autocast_is_open() -> None:
    module = te_modules.LayerNormLinear(64, 32)
    with pytest.raises(DTypeError, match=r"^inp of LayerNormLinear, outside of torch.autocast: expected torch.float32, got torch.bfloat16"):
        module(torch.randn(4, 64, dtype=torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(torch.randn(4, 64))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert module.weight.grad is not None and module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (lambda: te_modules.Linear(8, 8, delay_wgrad_compute=True), NotServedError, "Linear: expected delay_wgrad_compute=False, got True"),
        (
            lambda: te_modules.Linear(8, 8, parallel_mode="both"),
            ArgumentError,
            "parallel_mode of Linear: expected None, 'column' or 'row', got 'both'",
        ),
        (lambda: te_modules.Linear(8, 8, parameters_split={"a": 3}), ArgumentError, "parameters_split of Linear: expected sizes that add up to 8"),
        (lambda: te_modules.Linear(8, 8, tp_size=2, parallel_mode="row")(torch.ones(1, 4)), ArgumentError, "a group of 2 processes"),
        (lambda: te_modules.LayerNormMLP(8, 8, activation="tanh"), ArgumentError, "activation of LayerNormMLP: expected "),
        (lambda: te_modules.LayerNormMLP(8, 8, activation_params={"limit": 1.0}), ArgumentError, "no activation_params"),
        (lambda: te_modules.LayerNormLinear(8, 8, normalization="BatchNorm"), ArgumentError, "expected 'LayerNorm' or 'RMSNorm'"),
        (lambda: te_modules.LayerNorm(), ArgumentError, "LayerNorm: expected normalized_shape, or hidden_size as it was called, got neither"),
        (lambda: te_modules.Linear(8, 8)(torch.ones(1, 8), fp8_output=True), NotServedError, "Linear: expected fp8_output=False, got True"),
    ],
)
def test_what_is_refused_is_one_sentence(make: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as raised:
        make()
    assert sentence in str(raised.value) and ": expected " in str(raised.value) and str(raised.value).count(". ") == 0
