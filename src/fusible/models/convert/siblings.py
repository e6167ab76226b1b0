"""Layers that take the same input, as queries, keys and values do, computed together though their model calls them one by one.

The first of them that is called on an input computes all, as one product on an input that is quantized once; the others are handed theirs when they
are called on that very tensor.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fusible.models.convert.joining import is_joined
from fusible.pytorch.engine.lowered import own_parameter

if TYPE_CHECKING:
    from fusible.models.convert.attention import ConvertedAttention

__all__ = ["Siblings"]

_TRIES = 2
"""Inputs in a row for which outputs were made in vain, before each layer computes by itself: cross attention has queries of another input."""


class _Waiting(threading.local):
    """What one thread has computed, and nobody has called for yet: the outputs for ``x``, by places. ``seen``: the version of x when it was read, and
    whether gradients were recorded."""

    def __init__(self) -> None:  # for each thread: torch.compile guards that attributes are there
        self.x: torch.Tensor | None = None
        self.seen: tuple[int, bool] = (0, False)
        self.outputs: dict[int, torch.Tensor] = {}


class Siblings:
    """``members``: the linear layers. ``owner``: the module around them, which has their common pipeline."""

    def __init__(self, owner: ConvertedAttention, members: tuple[nn.Module, ...]) -> None:
        self._owner, self._members = owner, members
        self._rows: list[int] = [len(member._parameters["weight"]) for member in members]  # type: ignore[arg-type]  # pyright: ignore
        self._waiting, self._in_vain = _Waiting(), 0

    @property
    def together(self) -> bool:
        """Whether they are computed together still."""
        return self._in_vain < _TRIES

    def output(self, place: int, x: torch.Tensor) -> torch.Tensor | None:
        """The output for x of the member at a place; None where it is to compute by itself."""
        waiting = self._waiting
        seen = (0 if torch.compiler.is_compiling() or x.is_inference() else x._version, torch.is_grad_enabled())
        if waiting.x is x and waiting.seen == seen and place in waiting.outputs:
            y = waiting.outputs.pop(place)
            if not waiting.outputs:
                waiting.x, self._in_vain = None, 0
            return y
        if waiting.x is not None:
            waiting.x, waiting.outputs, self._in_vain = None, {}, self._in_vain + 1
        if not self.together or not is_joined([own_parameter(other, "weight") for other in self._members]):
            return None
        # Each an output of its own, as that of a layer that computes by itself: whatever is done to it.
        outputs: Any = torch.split_with_sizes_copy(self._owner.joined(x), self._rows, dim=-1)
        waiting.outputs = dict(enumerate(outputs))
        waiting.x, waiting.seen = x, seen
        return waiting.outputs.pop(place)
