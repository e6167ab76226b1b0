"""``Joined``: parameters that a product takes as one, held in parts under names of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusible.pytorch.engine.parametrized import parameter_of

__all__ = ["Joined"]


class _Parameters:
    """A module's parameters by name; one of several parts is their concatenation along the first dimension."""

    def __init__(self, module: torch.nn.Module, parts: Mapping[str, Sequence[str]]) -> None:
        self._module, self._parts = module, dict(parts)

    def __getitem__(self, name: str) -> torch.Tensor | None:
        parts = [parameter_of(self._module, part) for part in self._parts.get(name, (name,))]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def get(self, name: str) -> torch.Tensor | None:
        return self[name]


class Joined:
    """Stands for ``module`` in a pipeline. Its parameters are the module's, but each name in ``parts`` is the concatenation of those parameters along
    the first dimension.

    Each call concatenates anew; autograd carries the gradients back to the parts.
    """

    def __init__(self, module: torch.nn.Module, parts: Mapping[str, Sequence[str]]) -> None:
        self.whole, self._parameters = module, _Parameters(module, parts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "whole" not in vars(self):
            raise AttributeError(name)
        return getattr(self.whole, name)
