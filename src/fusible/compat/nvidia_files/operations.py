"""The scales of fusible operations: NVIDIA's keep them in each operation's ``_extra_state``, Fusible's in the ``scaling_state`` of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from fusible.compat.nvidia_files.extra_states import extra_state
from fusible.compat.nvidia_state import Recipe, UnknownRecord, write_state
from fusible.errors import CheckpointError, expected
from fusible.pytorch.engine.runner import PipelineRunner
from fusible.pytorch.modules.dictionaries import is_empty
from fusible.pytorch.modules.stateful import StatefulModule
from fusible.pytorch.ops import Quantize
from fusible.quantized import DelayedScaling, Format
from fusible.quantized.formats import FP8_MAX
from fusible.tex import DType

__all__ = ["operations_from_nvidia", "operations_to_nvidia"]

_EXTRA, _STATE = "_extra_state", "scaling_state"
_PASSES = (("forward", "fwd"), ("backward", "bwd"))
"""For each pass: its name, and how it ends the names of the package's tensors."""
_ORDER = ("x", "weight", "dy")
"""The order in which an operation's scales lie there, by what they are of."""


@dataclass(frozen=True)
class _Place:
    """Where NVIDIA's file has the scale of a slot: in the extra state ``key``, at an ``index`` of ``count``."""

    key: str
    index: int
    count: int


def operations_from_nvidia(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state``, a state dict of NVIDIA's fusible operations, as ``model.load_state_dict`` takes it: ``model`` has the same operations of Fusible's.

    The scales and histories of delayed scaling become those of its pipelines; the rest stays. Nothing of ``model`` is changed. Raises
    ``CheckpointError`` for what is no such state.
    """
    made = dict(state)
    for name, runner in _pipelines(model):
        places = {each: _places(model, runner, each) for each, _ in _PASSES}
        keys = {place.key for found in places.values() for place in found}
        states = {key: extra_state(state[key], key) for key in keys if not is_empty(state.get(key))}
        if any(states.values()):
            made[name] = _joined(places, states, _edges(runner))
        made |= {key: torch.empty(0, dtype=torch.uint8, device="cpu") for key in states}
    return made


def operations_to_nvidia(model: nn.Module) -> dict[str, Any]:
    """The state dict of Fusible's operations as NVIDIA's of the same form read it: scales are in each operation's ``_extra_state``."""
    made = model.state_dict()
    for name, runner in _pipelines(model):
        made.pop(name, None)
        saved = runner.scaling.save()
        if saved is None:
            continue
        read = runner.scaling.read(saved)
        recipe = runner.scaling.recipe or DelayedScaling(amax_history_len=len(read["forward"].amax_history))
        states: dict[str, dict[str, Any]] = {}
        for each, short in _PASSES:
            of_pass = read[each].advance(recipe) if read["open"] else read[each]
            scales, histories = of_pass.scale.clone(), of_pass.amax_history.T.clone()
            for there, here in _edges(runner) if each == "forward" else ():
                if not histories[there].any():
                    scales[there], histories[there] = scales[here], histories[here]
            for place, scale, history in zip(_places(model, runner, each), scales, histories, strict=True):
                state = states.setdefault(place.key, {}).setdefault(each, _blank(recipe, short, len(history), place.count))
                state[f"scale_{short}"][place.index], state[f"amax_history_{short}"][:, place.index] = scale, history
        made |= {key: write_state(state) for key, state in states.items()}
    return made


def _blank(recipe: DelayedScaling, short: str, window: int, count: int) -> dict[str, Any]:
    history = {
        f"scale_{short}": torch.ones(count, dtype=torch.float32, device="cpu"),
        f"amax_history_{short}": torch.zeros(window, count, dtype=torch.float32, device="cpu"),
    }
    return {"recipe": Recipe.of(recipe), **history, "extra_fp8_variables": {}}


def _pipelines(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, PipelineRunner]]:
    """The pipelines of the outermost modules that have some, with the names of their states."""
    if isinstance(model, StatefulModule):
        yield from ((f"{prefix}{_STATE}.{index}", model._runner(bound)) for index, bound in enumerate(model._pipelines()))
    else:
        for name, child in model.named_children():
            yield from _pipelines(child, f"{prefix}{name}.")


def _edges(runner: PipelineRunner) -> list[tuple[int, int]]:
    """Among the slots of forward, pairs of a ``Quantize`` and of the product behind it: NVIDIA's tensor between them is scaled by the first,
    Fusible's by the second, so that it fits the product."""
    slots = list(runner.scaling.layout.forward)
    found = ((f"{op}.x", f"{op + 1}.x") for op, bound in enumerate(runner.bound) if isinstance(bound.module, Quantize))
    return [(slots.index(one), slots.index(other)) for one, other in found if one in slots and other in slots]


def _places(model: nn.Module, runner: PipelineRunner, of_pass: str) -> list[_Place]:
    """For each slot of a pass: its place."""
    names = {id(module): name for name, module in model.named_modules()}
    parsed = [re.fullmatch(r"(\d+)\.([a-z]+)(\d*)", slot) for slot in getattr(runner.scaling.layout, of_pass)]
    slots = [(int(one[1]), one[2], int(one[3] or 0)) for one in parsed if one is not None]
    found = []
    for op, kind, group in slots:
        kinds = sorted({other for at, other, _ in slots if at == op}, key=_ORDER.index)
        count = sum(at == op for at, _, _ in slots)
        name = names[id(runner.bound[op].module)]
        found.append(_Place(f"{name}.{_EXTRA}" if name else _EXTRA, len(kinds) * group + kinds.index(kind), count))
    return found


def _joined(places: Mapping[str, list[_Place]], states: Mapping[str, Any], edges: list[tuple[int, int]]) -> torch.Tensor:
    """The state of a pipeline in the form that ``ScalingOwner.load`` takes. An operation without a state begins with a scale of 1."""
    tensors: dict[str, torch.Tensor] = {"open": torch.tensor([False], device="cpu")}
    try:
        found = [(state, each, short) for state in states.values() if state for each, short in _PASSES if each in state]
        window = max(len(state[each][f"amax_history_{short}"]) for state, each, short in found)
        formats = _format(next(state[each].get("recipe") for state, each, _ in found))
        for each, short in _PASSES:
            scale, history = (
                torch.ones(len(places[each]), dtype=torch.float32, device="cpu"),
                torch.zeros(window, len(places[each]), dtype=torch.float32, device="cpu"),
            )
            for column, place in enumerate(places[each]):
                state = (states.get(place.key) or {}).get(each)
                if state is not None:
                    _check_size(state[f"scale_{short}"], place)
                    own = state[f"amax_history_{short}"]
                    scale[column], history[: len(own), column] = state[f"scale_{short}"][place.index], own[:, place.index]
            for there, here in edges if each == "forward" else ():
                if not history[:, here].any():
                    scale[here], history[:, here] = scale[there], history[:, there]
            tensors |= {
                f"{each}.scale": scale,
                f"{each}.amax_history": history,
                f"{each}.fp8_dtype": torch.tensor([int(getattr(formats, each))], device="cpu"),
            }
    except (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        do = "use an intact checkpoint of the same operations"
        raise CheckpointError(expected("scales and amaxes", of="the _extra_state of an operation", got=f"otherwise ({error!r})", do=do)) from error
    return torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)


def _check_size(scale: torch.Tensor, place: _Place) -> None:
    if scale.numel() != place.count:
        do = "load it into the operations that it was saved from"
        raise CheckpointError(expected(f"{place.count} scales", of=place.key, got=scale.numel(), do=do))


@dataclass(frozen=True)
class _Formats:
    """The formats of a recipe, by pass."""

    forward: DType
    backward: DType


def _format(recipe: Any) -> _Formats:
    """What a recipe in a file says: a member of an enumeration by its name, or by its largest values, as some versions of Python write it."""
    said = recipe.fields.get("fp8_format") if isinstance(recipe, UnknownRecord) else None
    if isinstance(said, UnknownRecord) and said.member is None and said.arguments:
        largest = getattr(said.arguments[0], "arguments", said.arguments[0])
        found = [next(dtype for dtype, value in FP8_MAX.items() if value == one and isinstance(dtype, DType)) for one in largest[:2]]
        return _Formats(*found)
    member = Format[said.member] if isinstance(said, UnknownRecord) and said.member else Format.HYBRID
    return _Formats(member.forward, member.backward)
