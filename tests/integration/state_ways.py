"""Models whose state is carried, and the ways that torch has for it: ``way(model, fresh, path) -> the model that goes on``."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict

import fusible
from fusible.pytorch import ops, quantize_parameters
from fusible.pytorch.checkpoint import LoadPlanner
from fusible.quantized import (
    CustomRecipe,
    DelayedScalingRequest,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    QuantizerRole,
)
from fusible.quantized.saving import flatten_state_dict, unflatten_state_dict
from fusible.tex import DType

WIDTH, ROWS = 32, 32
RECIPES: dict[str, fusible.Recipe | None] = {
    "delayed": fusible.DelayedScaling(amax_history_len=3),
    "current": fusible.Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "block": fusible.Float8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(),
    "none": None,
}


def _hybrid(role: QuantizerRole) -> Quantizer:
    return HybridQuantizer(rowwise_quantizer=Float8CurrentScalingQuantizer(_E4M3), columnwise_quantizer=MXFP8Quantizer(_E4M3))


def _delayed_beside_current(role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
    return DelayedScalingRequest(amax_history_len=3) if role.tensor_type == "input" else Float8CurrentScalingQuantizer(_E4M3)


def _two_formats(role: QuantizerRole) -> Quantizer:
    return MXFP8Quantizer(_E4M3) if role.tensor_type == "input" else NVFP4Quantizer()


def _some_not(role: QuantizerRole) -> Quantizer | None:
    return Float8CurrentScalingQuantizer(_E4M3) if role.tensor_type == "weight" else IdentityQuantizer()


_E4M3 = DType.kFloat8E4M3
CUSTOM: dict[str, fusible.Recipe] = {
    f"custom-{factory.__name__.strip('_')}": CustomRecipe(factory) for factory in (_hybrid, _delayed_beside_current, _two_formats, _some_not)
}
EVERY = {**RECIPES, **CUSTOM}
HELD = {name: recipe for name, recipe in EVERY.items() if recipe is not None}


class Foreign(nn.Module):
    """A user's module with several of ours in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act = fusible.Linear(WIDTH, WIDTH), nn.Tanh()
        self.body = fusible.Sequential(fusible.RMSNorm(WIDTH), fusible.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.act(self.a(x)))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = ops.GroupedLinear(2, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, torch.tensor([ROWS // 2] * 2))


def _nested() -> nn.Module:
    up = fusible.Sequential(fusible.LayerNorm(WIDTH), fusible.Linear(WIDTH, 64))
    return fusible.Sequential(up, fusible.GELU(), nn.Tanh(), fusible.Sequential(fusible.Linear(64, WIDTH)))


def _attention() -> nn.Module:
    heads = fusible.MultiHeadedSelfAttention(WIDTH, 2)
    return fusible.Sequential(fusible.Residual(fusible.LayerNorm(WIDTH), fusible.Linear(WIDTH, 3 * WIDTH), heads, fusible.Linear(WIDTH, WIDTH)))


def _two() -> fusible.Sequential:
    return fusible.Sequential(fusible.Linear(WIDTH, WIDTH), fusible.GELU(), fusible.Linear(WIDTH, WIDTH))


def _held(recipe: fusible.Recipe) -> nn.Module:
    with fusible.quantized_model_init(recipe=recipe):
        return _two()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: fusible.Linear(WIDTH, WIDTH),
    "nested": _nested,
    "attention": _attention,
    "foreign": Foreign,
    "ops": lambda: ops.Sequential(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, 64), ops.GELU(), ops.Linear(64, WIDTH)),
    "ops-linear": lambda: ops.Linear(WIDTH, WIDTH),
    "grouped": Grouped,
    "quantized": lambda: quantize_parameters(_two()),
    **{f"held-{name}": partial(_held, recipe) for name, recipe in HELD.items()},
}


def make(kind: str, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[kind]()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer | None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(parameters, lr=0.05) if parameters else None


def train(model: nn.Module, recipe: fusible.Recipe | None, first: int, last: int, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """The losses of the steps ``[first, last)``; what is random follows from a step's number."""
    optimizer = optimizer or optimizer_of(model)
    losses = []
    for step in range(first, last):
        torch.manual_seed(100 + step)
        with fusible.autocast(enabled=recipe is not None, recipe=recipe):
            loss = model(torch.randn(ROWS, WIDTH, requires_grad=True)).square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def go_on(model: nn.Module, recipe: fusible.Recipe | None) -> list[float]:
    """The output of a call and the losses of three steps more, to the bit."""
    optimizer = optimizer_of(model)
    torch.manual_seed(7)
    with torch.no_grad(), fusible.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(torch.randn(ROWS, WIDTH))
    return [*y.flatten().tolist(), *train(model, recipe, 50, 53, optimizer)]


Way = Callable[[nn.Module, nn.Module, Path], nn.Module]
WAYS: dict[str, Way] = {}
IN_PLACE = {"dcp", "dcp of a module"}
"""Those that read only what ``fresh`` has a place for, and it has none for a scaling state."""
NOT_QUANTIZED = {"safetensors", "safetensors of a module"}
"""Those that cannot hold a quantized tensor, and say so."""


def way(name: str) -> Callable[[Way], Way]:
    def add(function: Way) -> Way:
        WAYS[name] = function
        return function

    return add


@way("load_state_dict")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    fresh.load_state_dict(model.state_dict())
    return fresh


@way("not strict")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    result = fresh.load_state_dict(model.state_dict(), strict=False)
    assert not result.missing_keys and not result.unexpected_keys
    return fresh


@way("assign")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    fresh.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return fresh


@way("a prefix")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    outer, other = nn.ModuleDict({"x": nn.Sequential(model)}), nn.ModuleDict({"x": nn.Sequential(fresh)})
    other.load_state_dict(outer.state_dict())
    return fresh


@way("hooks of a state dict")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    def renamed(state: dict[str, Tensor], old: str, new: str) -> None:
        for key in [key for key in state if key.startswith(old)]:
            state[new + key.removeprefix(old)] = state.pop(key)

    outer, other = nn.ModuleDict({"x": model}), nn.ModuleDict({"y": fresh})
    outer.register_state_dict_post_hook(lambda module, state, prefix, metadata: renamed(state, f"{prefix}x.", f"{prefix}saved."))
    other.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: renamed(state, f"{prefix}saved.", f"{prefix}y."))
    other.load_state_dict(outer.state_dict())
    return fresh


@way("deepcopy")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    return copy.deepcopy(model)


@way("torch.save of a state dict")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    torch.save(model.state_dict(), path / "model.pt")
    fresh.load_state_dict(torch.load(path / "model.pt", weights_only=True))
    return fresh


@way("torch.save of a module")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@way("safetensors")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    safetensors.torch.save_file(model.state_dict(), path / "model.safetensors")
    fresh.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"))
    return fresh


@way("safetensors of a module")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    safetensors.torch.save_model(model, str(path / "model.safetensors"))
    safetensors.torch.load_model(fresh, path / "model.safetensors")
    return fresh


@way("safetensors of plain tensors")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    tensors, metadata = flatten_state_dict(model.state_dict())
    safetensors.torch.save_file(tensors, path / "model.safetensors", metadata)
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        fresh.load_state_dict(unflatten_state_dict({name: file.get_tensor(name) for name in file.keys()}, file.metadata()))
    return fresh


@way("get_state_dict")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    state, _ = get_state_dict(model, [])
    set_state_dict(fresh, [], model_state_dict=state, optim_state_dict={})
    return fresh


@way("a full state dict on the CPU")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    set_model_state_dict(fresh, state, options=StateDictOptions(full_state_dict=True))
    return fresh


@way("get_state_dict of compiled models")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    compiled, other = (torch.compile(each, backend="aot_eager") for each in (model, fresh))
    state, _ = get_state_dict(compiled, [])
    set_state_dict(other, [], model_state_dict=state, optim_state_dict={})
    return fresh


@way("dcp of compiled models")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    compiled, other = (torch.compile(each, backend="aot_eager") for each in (model, fresh))
    dcp.save(get_model_state_dict(compiled), checkpoint_id=path / "dcp", no_dist=True)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=path / "dcp", no_dist=True, planner=LoadPlanner(state))
    set_model_state_dict(other, state)
    return fresh


@way("dcp")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    dcp.save(get_model_state_dict(model), checkpoint_id=path / "dcp", no_dist=True)
    state = get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=path / "dcp", no_dist=True)
    set_model_state_dict(fresh, state)
    return fresh


@way("dcp of a module")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    dcp.save({"model": model}, checkpoint_id=path / "dcp", no_dist=True)
    dcp.load({"model": fresh}, checkpoint_id=path / "dcp", no_dist=True)
    return fresh


@way("dcp with LoadPlanner")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    dcp.save(model.state_dict(), checkpoint_id=path / "dcp", no_dist=True)
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=path / "dcp", no_dist=True, planner=LoadPlanner(state))
    fresh.load_state_dict(state)
    return fresh


@way("dcp of a module with LoadPlanner")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    dcp.save({"model": model}, checkpoint_id=path / "dcp", no_dist=True)
    dcp.load({"model": fresh}, checkpoint_id=path / "dcp", no_dist=True, planner=LoadPlanner())
    return fresh


@way("dcp into a model that was called")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    context = fusible.DelayedScaling(amax_history_len=3)
    if any("scaling_state" in name for name in model.state_dict()):
        train(fresh, context, 0, 1)
    dcp.save(get_model_state_dict(model), checkpoint_id=path / "dcp", no_dist=True)
    state = get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=path / "dcp", no_dist=True)
    set_model_state_dict(fresh, state)
    return fresh


@way("to")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    return model.to("cpu").to(torch.float32)


@way("meta and assign")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    on_meta = copy.deepcopy(fresh).to("meta")
    on_meta.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return on_meta


@way("to_empty")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    empty = fresh.to("meta").to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    return empty


@way("AveragedModel")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    return averaged.module


@way("functional_call")
def _(model: nn.Module, fresh: nn.Module, path: Path) -> nn.Module:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.functional_call(self.model, dict(self.model.named_parameters()), (x,))

    return Called()
