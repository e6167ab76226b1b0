"""Options of the layers by NVIDIA's names that are set after a layer was made: what NVIDIA's read at each call takes effect, others are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusible
from fusible.compat import te_modules as te
from fusible.compat.te_quantization import autocast
from fusible.errors import ArgumentError, FusibleError
from fusible.pytorch import ops

WIDTH = 32
DELAYED = fusible.DelayedScaling(amax_history_len=4)
NORM: dict[str, tuple[Any, ...]] = {"eps": (0.5, 2), "zero_centered_gamma": (True,), "fuse_wgrad_accumulation": (True,)}


class Grouped(te.GroupedLinear):
    """With groups of its own, and so a module of one argument."""

    def forward(self, inp: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(inp, [24, 8])


MADE: dict[str, tuple[Callable[..., nn.Module], dict[str, tuple[Any, ...]]]] = {
    "Linear": (lambda **o: te.Linear(WIDTH, WIDTH, **o), {"fuse_wgrad_accumulation": (True,)}),
    "GroupedLinear": (lambda **o: Grouped(2, WIDTH, WIDTH, **o), {"fuse_wgrad_accumulation": (True,)}),
    "LayerNormLinear": (lambda **o: te.LayerNormLinear(WIDTH, WIDTH, **o), NORM),
    "LayerNormLinear of RMSNorm": (lambda **o: te.LayerNormLinear(WIDTH, WIDTH, normalization="RMSNorm", **o), NORM),
    "LayerNormLinear in parts": (
        lambda **o: te.LayerNormLinear(WIDTH, WIDTH, parameters_split=("one", "two"), **o),
        {name: values for name, values in NORM.items() if name != "fuse_wgrad_accumulation"},
    ),
    "LayerNormLinear with its normalized input": (lambda **o: te.LayerNormLinear(WIDTH, WIDTH, return_layernorm_output=True, **o), NORM),
    "LayerNormMLP": (lambda **o: te.LayerNormMLP(WIDTH, WIDTH, **o), {**NORM, "activation": ("relu", "silu")}),
    "LayerNormMLP, gated": (lambda **o: te.LayerNormMLP(WIDTH, WIDTH, **{"activation": "geglu", **o}), {**NORM, "activation": ("swiglu",)}),
    "LayerNormMLP, clamped": (
        lambda **o: te.LayerNormMLP(WIDTH, WIDTH, activation="clamped_swiglu", **o),
        {"activation_params": ({"limit": 0.25}, {"alpha": 2.0})},
    ),
}
CASES = [
    pytest.param(name, option, value, id=f"{name}-{option}-{value}")
    for name, (_, options) in MADE.items()
    for option, values in options.items()
    for value in values
]


def made(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    module = MADE[name][0](**options)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) / 2)
    return module


def results(module: nn.Module) -> list[Any]:
    """The outputs of a call, all gradients, ``main_grad``, and the state."""
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for parameter in module.parameters():
        parameter.grad, parameter.main_grad = None, torch.zeros_like(parameter)  # type: ignore[attr-defined]
    with autocast(recipe=DELAYED):
        y = module(x)
    outputs = y if isinstance(y, tuple) else (y,)
    torch.stack([each.square().sum() for each in outputs]).sum().backward()
    state = [value for value in module.state_dict().values() if isinstance(value, Tensor)]
    return [*outputs, x.grad, *(each for p in module.parameters() for each in (p.grad, p.main_grad)), *state]  # type: ignore[attr-defined]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(one, other, strict=True))


def called(module: nn.Module) -> nn.Module:
    for _ in range(3):  # the third is replayed
        results(module)
    return module


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fresh": lambda module: module,
    "called": called,
    "copied": lambda module: copy.deepcopy(called(module)),
    "pickled": lambda module: pickle.loads(pickle.dumps(called(module))),
    "in a Sequential": lambda module: called(nn.Sequential(module)),
    "in a fusible.Sequential": lambda module: called(fusible.Sequential(module, te.Linear(WIDTH, WIDTH))),
    "in an ops.Sequential": lambda module: called(ops.Sequential(te.Linear(WIDTH, WIDTH), module)),
}


def layer_of(model: nn.Module, name: str) -> nn.Module:
    """The layer under test: the last one inside that is of its class, but in a list that goes on with another ``Linear``."""
    layers = [module for module in model.modules() if type(module) is type(MADE[name][0]())]
    return layers[0 if isinstance(model, fusible.Sequential) else -1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "option", "value"), CASES)
def test_an_option_that_is_set_takes_effect(name: str, option: str, value: Any, way: str) -> None:
    """At the next call, as of a layer that was made so; the scales of delayed scaling go on."""
    if "normalized input" in name and way.endswith(".Sequential"):
        pytest.skip("a layer of two outputs ends a list")
    if name == "GroupedLinear" and way.endswith(".Sequential"):
        pytest.skip("a list gives it its groups as an extra input")
    model = WAYS[way](made(name))
    twin = copy.deepcopy(model)
    former, layer = results(copy.deepcopy(model)), layer_of(model, name)
    default = getattr(layer, option)
    setattr(layer, option, value)
    assert getattr(layer, option) == value
    found = results(model)
    assert not same(found, former)
    if not way.endswith("Sequential"):
        wanted = made(name, **{option: value})
        wanted.load_state_dict(twin.state_dict())
        assert same(found, results(wanted))
    setattr(layer, option, default)
    if way != "fresh":  # which has no scales to go back to
        model.load_state_dict(twin.state_dict())
        assert same(results(model), former)


REFUSED = {
    "a magnitude": (lambda: te.LayerNormLinear(WIDTH, WIDTH), "eps", -1.0),
    "no number": (lambda: te.LayerNormMLP(WIDTH, WIDTH), "eps", "1e-5"),
    "no bool": (lambda: te.LayerNormMLP(WIDTH, WIDTH), "zero_centered_gamma", "yes"),
    "no activation": (lambda: te.LayerNormMLP(WIDTH, WIDTH), "activation", "tanh"),
    "a gate without rows": (lambda: te.LayerNormMLP(WIDTH, WIDTH), "activation", "swiglu"),
    "rows without a gate": (lambda: te.LayerNormMLP(WIDTH, WIDTH, activation="swiglu"), "activation", "silu"),
    "options that it has not": (lambda: te.LayerNormMLP(WIDTH, WIDTH), "activation_params", {"limit": 1.0}),
    "parts of a weight": (lambda: te.Linear(WIDTH, WIDTH, parameters_split=("a", "b")), "fuse_wgrad_accumulation", True),
    "another normalization": (lambda: te.LayerNormLinear(WIDTH, WIDTH), "normalization", "RMSNorm"),
    "another output": (lambda: te.LayerNormMLP(WIDTH, WIDTH), "return_layernorm_output", True),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_set_is_refused(what: str) -> None:
    """In one sentence, and nothing has changed then."""
    make, option, value = REFUSED[what]
    module = called(make())
    twin, former = copy.deepcopy(module), getattr(module, option)
    with pytest.raises(FusibleError, match=f"{option.split('_')[0]}|LayerNorm|Linear") as raised:
        setattr(module, option, value)
    assert isinstance(raised.value, ArgumentError | TypeError) and ": expected " in str(raised.value)
    assert getattr(module, option) == former and same(results(module), results(twin))
    setattr(module, option, former)  # what it has it may be told
