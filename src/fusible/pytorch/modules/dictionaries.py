"""Helpers for the state dicts of modules, of torch and of Transformer Engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fusible.pytorch.engine.shares import local_of
from fusible.pytorch.modules.places import Place
from fusible.quantized import QuantizedTensor

__all__ = ["ScalingStates", "is_empty", "quantized_as", "versions", "written_in_place"]


class ScalingStates(dict[str, torch.Tensor]):
    """The saved scaling states of a module by their numbers, as items and as attributes. A number without a state is a ``Place``."""

    def __getattr__(self, name: str) -> torch.Tensor:
        if not name.isdecimal():
            raise AttributeError(f"no scaling state {name!r}")
        return self.get(name, Place())


def is_empty(extra_state: Any) -> bool:
    """Whether there is nothing in a module's extra state: what Transformer Engine writes of a module without scales."""
    return extra_state is None or (isinstance(extra_state, torch.Tensor) and not extra_state.numel())


def quantized_as(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """``after``, of the device and dtype that it has, quantized where ``before`` is: by the same bytes."""
    if not isinstance(before, QuantizedTensor) or isinstance(after, QuantizedTensor) or not after.is_floating_point():
        return after
    return type(before).make_like(before.to(after.device), dtype=after.dtype)


def versions(module: nn.Module) -> dict[str, int]:
    """The version counter of each parameter of the module itself."""
    parameters = {name: local_of(parameter) for name, parameter in module._parameters.items() if parameter is not None}
    return {name: parameter._version for name, parameter in parameters.items() if not parameter.is_inference()}


def written_in_place(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> bool:
    """Whether ``state_dict`` holds parameters of ``module`` themselves, or of modules inside, and they were written to since it was made."""
    for name, inner in module.named_modules(prefix=prefix.removesuffix(".")):
        handed_out: dict[str, int] = getattr(inner, "_handed_out", {})
        for own, version in handed_out.items():
            parameter, value = inner._parameters.get(own), state_dict.get(f"{name}.{own}" if name else own)
            if parameter is None or not isinstance(value, torch.Tensor):
                continue
            if _memory(local_of(value)) == _memory(local_of(parameter)) and local_of(parameter)._version != version:
                return True
    return False


def _memory(tensor: torch.Tensor) -> tuple[int, ...]:
    parts = tensor.get_metadata().values() if isinstance(tensor, QuantizedTensor) else (tensor,)
    return tuple(part.data_ptr() for part in parts if isinstance(part, torch.Tensor))
