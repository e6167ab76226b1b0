"""Scaling states, parameters held in high precision or in 8 bits: every way of torch's carries them to the bit, or raises."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from state_ways import CUSTOM, EVERY, HELD, IN_PLACE, MODELS, NOT_QUANTIZED, RECIPES, WAYS, WIDTH, go_on, make, train
from torch import nn
from torch.optim.swa_utils import AveragedModel

import fusible
from fusible import autocast
from fusible.errors import ArgumentError, CheckpointError
from fusible.pytorch import ops
from fusible.pytorch.checkpoint import LoadPlanner
from fusible.pytorch.export import export
from fusible.quantized import QuantizedTensor

# Of one process, with no group to say so.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
FEW = [(kind, "delayed") for kind in ("linear", "nested", "foreign", "ops", "held-delayed")] + [("ops", "mxfp8"), ("held-mxfp8", "current")]
REST = [(kind, recipe) for kind in MODELS for recipe in RECIPES if (kind, recipe) not in FEW]
REST += [(kind, recipe) for kind in ("linear", "nested", "ops", "held-current") for recipe in CUSTOM]


@functools.cache
def uninterrupted(kind: str, recipe: str) -> list[float]:
    model = make(kind)
    train(model, EVERY[recipe], 0, 3)
    return go_on(model, EVERY[recipe])


def carried(kind: str, recipe: str, way: str, path: Path) -> None:
    model = make(kind)
    train(model, EVERY[recipe], 0, 3)
    if way in NOT_QUANTIZED and any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters()):
        with pytest.raises(safetensors.SafetensorError):
            WAYS[way](model, make(kind, 2), path)
        return
    after = WAYS[way](model, make(kind, 2), path)
    if way in IN_PLACE and any("scaling_state" in name for name in model.state_dict()):
        with pytest.raises(CheckpointError, match=r"^[^\n]*: expected the scaling state, got none; read it by [^\n]*LoadPlanner[^\n]*\.$"):
            go_on(after, EVERY[recipe])
        return
    assert go_on(after, EVERY[recipe]) == uninterrupted(kind, recipe)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "recipe"), FEW)
def test_a_way_carries_the_state(kind: str, recipe: str, way: str, tmp_path: Path) -> None:
    carried(kind, recipe, way, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_carries_every_state(way: str, tmp_path: Path) -> None:
    for number, (kind, recipe) in enumerate(REST):
        (tmp_path / str(number)).mkdir()
        carried(kind, recipe, way, tmp_path / str(number))


def test_the_state_matters() -> None:
    """What is compared above is sensitive to it: without its scaling state a model goes on otherwise."""
    for kind in MODELS:
        model = make(kind)
        train(model, RECIPES["delayed"], 0, 3)
        model.load_state_dict(model.state_dict())
        for module in model.modules():
            if isinstance(module, fusible.BaseModule):
                module.reset_scaling_state()
        assert go_on(model, RECIPES["delayed"]) != uninterrupted(kind, "delayed"), kind


def test_a_model_that_was_loaded_in_place_may_begin_anew(tmp_path: Path) -> None:
    model, fresh = make("linear"), make("linear", 2)
    train(model, RECIPES["delayed"], 0, 3)
    WAYS["dcp"](model, fresh, tmp_path)
    assert go_on(fresh, None) and isinstance(fresh, fusible.BaseModule)
    with pytest.raises(CheckpointError):
        train(fresh, RECIPES["delayed"], 0, 1)
    fresh.reset_scaling_state()
    train(fresh, RECIPES["delayed"], 0, 1)


def test_a_model_that_takes_its_own_dictionary_back_is_as_before() -> None:
    model = make("nested")
    model.load_state_dict(model.state_dict())
    assert train(model, RECIPES["delayed"], 0, 2) == train(make("nested"), RECIPES["delayed"], 0, 2)


def test_a_planner_that_was_given_no_dictionary_says_so(tmp_path: Path) -> None:
    model = make("linear")
    train(model, RECIPES["delayed"], 0, 1)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    wanted = r"CheckpointError: LoadPlanner: expected the dictionary that is loaded, got none to put 'scaling_state.0' in"
    with pytest.raises(dcp.CheckpointException, match=wanted):
        dcp.load(make("linear").state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True, planner=LoadPlanner())


@pytest.mark.parametrize("kind", ["linear", "foreign", "ops"])
def test_a_dictionary_without_scaling_state_is_told_in_any_module(kind: str) -> None:
    """At the top, and inside a module that is none of ours."""
    plain = {name: value.clone() for name, value in make(kind, 2).state_dict().items()}
    model = make(kind)
    train(model, RECIPES["delayed"], 0, 2)
    missing = [name for name in model.state_dict() if name not in plain]
    assert missing and all("scaling_state" in name for name in missing)
    with pytest.raises(RuntimeError, match=missing[0]):
        model.load_state_dict(plain)
    assert model.load_state_dict(plain, strict=False).missing_keys == missing


def te_shaped(module: nn.Module, extra: Any = None) -> dict[str, Any]:
    """A dictionary as Transformer Engine's layers of the same parameters write it: with an ``_extra_state``, empty where nothing was quantized."""
    extra = torch.empty(0, dtype=torch.uint8) if extra is None else extra
    return {**{name: value.clone() for name, value in module.state_dict().items()}, "_extra_state": extra}


PAIRS = [
    (lambda: fusible.Linear(6, 4), lambda: nn.Linear(6, 4)),
    (lambda: fusible.Linear(6, 4, bias=False), lambda: nn.Linear(6, 4, bias=False)),
    (lambda: fusible.LayerNorm(6), lambda: nn.LayerNorm(6)),
    (lambda: fusible.RMSNorm(6), lambda: nn.RMSNorm(6, eps=1e-5)),
    (lambda: ops.LayerNorm(6), lambda: nn.LayerNorm(6)),
    (lambda: ops.RMSNorm(6), lambda: nn.RMSNorm(6, eps=1e-5)),
    (lambda: ops.BasicLinear(6, 4), lambda: nn.Linear(6, 4, bias=False)),
]


@pytest.mark.parametrize("pair", [*PAIRS, (lambda: ops.Linear(6, 4), lambda: nn.Linear(6, 4))])
@pytest.mark.parametrize("wrap", [lambda module: module, lambda module: nn.ModuleDict({"x": module})], ids=["alone", "inside"])
def test_dictionaries_of_torch_and_of_transformer_engine_load(pair: Any, wrap: Any) -> None:
    ours, theirs = (make() for make in pair)
    x = torch.randn(3, 6)
    for state in (dict(theirs.state_dict()), te_shaped(theirs)):
        for parameter in ours.parameters():
            nn.init.ones_(parameter)
        named = wrap(theirs).state_dict()
        prefix = "x." if len(named) and next(iter(named)).startswith("x.") else ""
        wrap(ours).load_state_dict({f"{prefix}{name}": value for name, value in state.items()})
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("pair", PAIRS)
def test_our_dictionaries_load_into_torchs_layers(pair: Any) -> None:
    """Strictly, unless the layer has run under delayed scaling: then the scales are what torch's layer does not know. Operations have the place
    that NVIDIA's have for theirs, which its package wants and torch's layers do not."""
    ours, theirs = (make() for make in pair)
    state = ours.state_dict()
    if isinstance(ours, ops.BasicOperation):
        assert not state.pop("_extra_state").numel()
    theirs.load_state_dict(state)
    torch.testing.assert_close(ours(x := torch.randn(3, 6)), theirs(x))


def test_a_pickle_of_transformer_engines_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, or left unread and told where less is asked."""
    monkeypatch.chdir(tmp_path)
    bytes_ = b"cos\nsystem\n(S'touch unpickled'\ntR."
    ours, theirs = fusible.Linear(6, 4), nn.Linear(6, 4)
    state = te_shaped(theirs, torch.frombuffer(bytearray(bytes_), dtype=torch.uint8))
    before = ours.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"^a checkpoint of Linear: expected an empty _extra_state, .*, got another for '_extra_state'; .*\.$"):
        ours.load_state_dict(state)
    with pytest.raises(RuntimeError, match="_extra_state"):
        nn.ModuleDict({"x": ours}).load_state_dict({f"x.{name}": value for name, value in state.items()})
    assert ours.load_state_dict(state, strict=False).unexpected_keys == ["_extra_state"]
    assert torch.equal(ours.weight, theirs.weight) and not torch.equal(ours.weight, before) and not list(tmp_path.iterdir())


def test_dtypes_leave_scales_and_quantized_values_as_they_are() -> None:
    for kind in MODELS:
        model = make(kind)
        train(model, RECIPES["delayed"], 0, 2)
        before = model.state_dict()
        values = {name: value.dequantize() for name, value in before.items() if isinstance(value, QuantizedTensor)}
        model.to(torch.bfloat16)
        after = model.state_dict()
        for name, value in after.items():
            if "scaling_state" in name or name.endswith("_extra_state"):
                assert torch.equal(value, before[name])
            else:
                assert value.dtype is torch.bfloat16 and isinstance(value, QuantizedTensor) == (name in values)
                assert name not in values or torch.equal(value.dequantize(dtype=torch.float32), values[name])


def test_an_average_has_the_scales_of_its_model() -> None:
    model = make("nested")
    averaged = AveragedModel(model, use_buffers=True)
    train(model, RECIPES["delayed"], 0, 2)
    averaged.update_parameters(model)
    assert not list(model.buffers()) and train(averaged, RECIPES["delayed"], 0, 2)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize("kind", ["linear", "nested", "foreign", "ops", "held-mxfp8"])
def test_an_exported_program_computes_with_the_scales(kind: str, recipe: str, tmp_path: Path) -> None:
    model, x = make(kind), torch.randn(32, WIDTH)
    train(model, RECIPES[recipe], 0, 3)
    with torch.no_grad(), autocast(recipe=RECIPES[recipe]):
        assert torch.equal(torch.export.export(model.eval(), (x,)).module()(x), model(x))
        if kind in ("nested", "foreign"):
            with pytest.raises(ArgumentError, match=r"^[^\n]*: expected one pipeline of operations, [^\n]*\.$"):
                export(model, tmp_path / "program", x)  # type: ignore[arg-type]


@pytest.mark.parametrize("used", EVERY)
@pytest.mark.parametrize("held", [*HELD, "nvfp4-1d"])
def test_forward_and_backward_see_one_weight(held: str, used: str) -> None:
    """Of a weight that is held quantized, unless both operands of the products are in its format: then each product reads the copy made for it."""
    recipe = fusible.NVFP4BlockScaling(disable_2d_quantization=True) if held == "nvfp4-1d" else HELD[held]
    if used == held.removesuffix("-1d") or {held, used} in ({"custom-two_formats", "nvfp4"}, {"custom-two_formats", "nvfp4-1d"}):
        pytest.skip("the products are in the weight's format")
    with fusible.quantized_model_init(recipe=recipe):
        layers = [fusible.Linear(WIDTH, 64, bias=False), ops.BasicLinear(WIDTH, 64)]
    for layer in layers:
        outlier = torch.ones(64, 1)
        outlier[::7] = 2.0**-9
        with torch.no_grad():
            layer.weight.copy_(torch.randn(64, WIDTH) * outlier)
        x = torch.eye(WIDTH, requires_grad=True)
        with autocast(enabled=EVERY[used] is not None, recipe=EVERY[used]):
            forward = layer(x).detach().T
            grad = torch.autograd.grad(layer(y := torch.zeros(64, WIDTH, requires_grad=True)), y, torch.eye(64))[0]
        # Ones are exact in every format; the scale of a format costs a rounding of fp32, of which there are two on the way.
        torch.testing.assert_close(grad, forward, rtol=4 * torch.finfo(torch.float32).eps, atol=0)
        torch.testing.assert_close(forward, layer.weight.dequantize().detach(), rtol=4 * torch.finfo(torch.float32).eps, atol=0)
