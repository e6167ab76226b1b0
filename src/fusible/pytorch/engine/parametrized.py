"""Parameters that ``torch.nn.utils.parametrize`` computes from others: weight norm, spectral norm, orthogonal matrices, and a user's own.

Such a parameter is no entry of ``module._parameters`` any more. Its value is what the module's attribute gives at a call, once for each call, and its
gradient goes on to what it is computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["originals", "parameter_of"]


def parameter_of(module: nn.Module, name: str) -> Any:
    """The module's parameter, or the tensor that is computed in its place."""
    parameter = module._parameters.get(name)
    return getattr(module, name) if parameter is None else parameter


def originals(module: nn.Module, name: str) -> Sequence[torch.Tensor]:
    """The parameters of the module that stand for the one of the name: itself, or those that it is computed from."""
    parameter = module._parameters.get(name)
    return tuple(module.parametrizations[name].parameters()) if parameter is None else (parameter,)  # type: ignore[index, union-attr]  # pyright: ignore
