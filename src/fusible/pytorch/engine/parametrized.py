"""Parameters that ``torch.nn.utils.parametrize`` computes from others: weight norm, spectral norm, orthogonal matrices, and a user's own.

Such a parameter is no entry of ``module._parameters`` any more. Its value is what the module's attribute gives at a call, once for each call, and its
gradient goes on to what it is computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fusible.errors import ArgumentError, expected

__all__ = ["is_computed", "is_missing", "lacks_parameter", "originals", "parameter_of", "tensors_of"]


def parameter_of(module: nn.Module, name: str) -> Any:
    """The module's parameter, or the tensor that is computed in its place."""
    parameter = module._parameters.get(name)
    return getattr(module, name) if parameter is None else parameter


def originals(module: nn.Module, name: str) -> Sequence[torch.Tensor]:
    """The parameters of the module that stand for the one of the name: itself, or those that it is computed from; none for a buffer."""
    parameter = module._parameters.get(name)
    if parameter is None and name in module._buffers:
        return ()
    return tuple(module.parametrizations[name].parameters()) if parameter is None else (parameter,)  # type: ignore[index, union-attr]  # pyright: ignore


def is_computed(module: nn.Module, name: str) -> bool:
    """Whether the parameter is computed from others."""
    return name not in module._parameters and name in module._modules.get("parametrizations", ())  # type: ignore[operator]


def is_missing(module: Any, name: str) -> bool:
    """Whether the module has neither the parameter, or buffer, nor anything that is computed in its place."""
    return tensors_of(module, name).get(name) is None and getattr(module, name, None) is None


def lacks_parameter(module: Any, name: str) -> ArgumentError:
    """The error of a module without a parameter that its op takes."""
    do = "assign another one, or make another module"
    return ArgumentError(expected("a parameter", of=f"{name} of {type(module).__name__}", got="none", do=do))


def tensors_of(module: nn.Module, name: str) -> dict[str, Any]:
    """The module's table in which a tensor that its op takes is to be looked up: of buffers, or of parameters."""
    buffers: dict[str, Any] = getattr(module, "_buffers", {})  # what stands for a module may have none
    return buffers if name in buffers else module._parameters
