"""``_extra_state``: the place that NVIDIA's modules have for their scaling states in every state dict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save as save_tensors

from fusible.compat.nvidia_files.extra_states import extra_state, is_stateless, present_form
from fusible.compat.nvidia_state import Recipe, write_state
from fusible.compute_pipeline import StateLayout
from fusible.errors import CheckpointError, expected
from fusible.pytorch.engine.scaling import ScalingOwner
from fusible.pytorch.modules.dictionaries import is_empty
from fusible.pytorch.modules.stateful import StatefulModule
from fusible.quantized import DelayedScaling
from fusible.quantized.formats import FP8_MAX
from fusible.tex import DType

__all__ = ["DelayedExtraState", "WithExtraState"]

_EXTRA = "_extra_state"
_STATE = "scaling_state.0"
_OWN = "fusible"
"""The key under which the pickle also holds the state as ``ScalingOwner.save`` writes it. That form has the running iteration, which the package's
form lacks."""
_PASSES = (("forward", "fwd", 3, {"x": 0, "weight": 1}), ("backward", "bwd", 2, {"dy": 0}))
"""For each pass: our name and the package's, the scales that the package keeps for one product, and the places of ours among them by tensor. The
others are scales of outputs."""


class DelayedExtraState(StatefulModule):
    """Mixin of a module with one pipeline: it saves and loads its scaling state in the package's form, so each loads the other's checkpoints."""

    def get_extra_state(self) -> torch.Tensor:
        """uint8: empty, or a pickle of a recipe and of scales and amaxes, as the package writes it."""
        if not self._saved_states():
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return _written(self._runner().scaling)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}{_STATE}", None)

    def _entry(self, name: str) -> str:
        return _EXTRA

    def _rename(self, state_dict: dict[str, Any], prefix: str) -> None:
        super()._rename(state_dict, prefix)
        extra = state_dict.get(f"{prefix}{_EXTRA}")
        if not is_empty(extra):
            saved = _read(extra, self._runner().scaling.layout, type(self).__name__)
            if saved is not None:
                state_dict[f"{prefix}{_STATE}"] = saved
            del state_dict[f"{prefix}{_EXTRA}"]


class WithExtraState:
    """Mixin of a module that quantizes nothing here but does in the package: the state that a checkpoint brings is kept, and saved as it came."""

    _extra: torch.Tensor | None = None

    def get_extra_state(self) -> torch.Tensor:
        """uint8: what was loaded, else empty."""
        return torch.empty(0, dtype=torch.uint8, device="cpu") if self._extra is None else self._extra

    def set_extra_state(self, state: Any) -> None:
        """Raises ``CheckpointError`` for what is no state of the package's."""
        of = _of(type(self).__name__)
        self._extra = None if is_empty(state) or is_stateless(extra_state(state, of)) else present_form(state, of).detach().to("cpu", copy=True)


def _places(slots: Sequence[str], size: int, kinds: Mapping[str, int]) -> list[int]:
    """For each of our scales (``slots``) its index among the package's, which keeps ``size`` scales for each product, one product after another. A
    slot is named ``<op>.<tensor>``, or ``<op>.<tensor><group>`` for grouped products."""
    parsed = [re.fullmatch(r"(\d+)\.([a-z]+)(\d*)", slot) for slot in slots]
    found = [match.groups() for match in parsed if match is not None]
    ops = sorted({int(op) for op, _, _ in found})
    return [size * (int(group) if group else ops.index(int(op))) + kinds[kind] for op, kind, group in found]


def _written(owner: ScalingOwner) -> torch.Tensor:
    saved = owner.save()
    assert saved is not None
    read = owner.read(saved)
    recipe = owner.recipe or DelayedScaling(amax_history_len=len(read["forward"].amax_history))
    products = len(owner.layout.backward)
    state: dict[str, Any] = {"recipe": Recipe.of(recipe)}
    variables: dict[str, Any] = {"fp8_checkpoint": True, "num_gemms": products}
    for name, short, size, kinds in _PASSES:
        of_pass = read[name].advance(recipe) if read["open"] else read[name]
        places = _places(of_pass.slots, size, kinds)
        scale, history = (
            torch.ones(size * products, dtype=torch.float32, device="cpu"),
            torch.zeros(len(of_pass.amax_history), size * products, dtype=torch.float32, device="cpu"),
        )
        scale[places], history[:, places] = of_pass.scale, of_pass.amax_history
        state[f"scale_{short}"], state[f"amax_history_{short}"] = scale, history
        variables[f"fp8_max_{short}"] = int(FP8_MAX[of_pass.fp8_dtype])
    return write_state({**state, "extra_fp8_variables": variables, _OWN: saved})


def _read(extra: Any, layout: StateLayout, module: str) -> torch.Tensor | None:
    """The state in the form that ``ScalingOwner.load`` takes, read from an extra state that the package, of any version, or Fusible wrote; None where
    it has none of delayed scaling."""
    of = _of(module)
    state = extra_state(extra, of)
    if isinstance(state, dict) and isinstance(state.get(_OWN), torch.Tensor):
        return state[_OWN]
    if is_stateless(state):
        return None
    tensors: dict[str, torch.Tensor] = {"open": torch.tensor([False], device="cpu")}
    try:
        variables = state["extra_fp8_variables"]
        for name, short, size, kinds in _PASSES:
            values = state[f"scale_{short}"]
            if values.numel() == (size - 1) * len(layout.backward):  # old versions have none for outputs
                size -= 1
            places = _places(getattr(layout, name), size, kinds)
            largest = float(variables.get(f"fp8_max_{short}", 448.0 if short == "fwd" else 57344.0))
            tensors[f"{name}.scale"] = values[places].contiguous()
            tensors[f"{name}.amax_history"] = state[f"amax_history_{short}"][:, places].contiguous()
            tensors[f"{name}.fp8_dtype"] = torch.tensor([_format(largest)], device="cpu")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        do = "use an intact checkpoint, or load it with strict=False"
        raise CheckpointError(expected("scales and amaxes", of=of, got=f"otherwise ({error!r})", do=do)) from error
    return torch.frombuffer(bytearray(save_tensors(tensors)), dtype=torch.uint8)


def _of(module: str) -> str:
    return f"the _extra_state of {module}"


def _format(largest: float) -> int:
    return int(next(dtype for dtype, value in FP8_MAX.items() if value == largest and isinstance(dtype, DType)))
