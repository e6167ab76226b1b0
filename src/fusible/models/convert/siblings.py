"""Layers that take the same input, as queries, keys and values do, computed together though their model calls them one by one.

The first of them that is called on an input computes all, as one product on an input that is quantized once; the others are handed theirs when they
are called on that very tensor. They do so in a call of the module around them that gives them one input. Which calls those are is found by trying
the module when the model is converted (``projections``), and not by what earlier calls did: a forward that backward repeats takes the path of the
first one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fusible.models.convert.calls import Call
from fusible.models.convert.joining import is_joined
from fusible.pytorch.engine.lowered import own_parameter

if TYPE_CHECKING:
    from fusible.models.convert.attention import ConvertedAttention

__all__ = ["Siblings"]


class _Call(Call):
    """``outputs``: those for ``x`` that nobody has called for yet, by places, each with how often its layer's parameters had been written to;
    ``writes``: how often x had been."""

    def __init__(self) -> None:
        super().__init__()
        self.x: torch.Tensor | None = None
        self.writes = 0
        self.outputs: dict[int, tuple[torch.Tensor, int]] = {}

    def end(self) -> None:
        super().end()
        self.x, self.outputs = None, {}


class Siblings:
    """``members``: the linear layers. ``owner``: the module around them, which has their common pipeline."""

    def __init__(self, owner: ConvertedAttention, members: tuple[nn.Module, ...]) -> None:
        self._owner, self._members = owner, members
        self._rows: list[int] = [len(member._parameters["weight"]) for member in members]  # type: ignore[arg-type]  # pyright: ignore
        self.call = _Call()

    def output(self, place: int, x: torch.Tensor) -> torch.Tensor | None:
        """The output for x of the member at a place; None where it is to compute by itself."""
        call = self.call
        if not call.is_under_way():
            return None
        if call.outputs:
            if call.x is not x or call.writes != _writes(x) or place not in call.outputs:
                return None
            y, writes = call.outputs.pop(place)
            return y if writes == _writes(*self._members[place]._parameters.values()) else None
        if not self._may_join():
            return None
        # Each an output of its own, as that of a layer that computes by itself: whatever is done to it.
        outputs: Any = torch.split_with_sizes_copy(self._owner.joined(x), self._rows, dim=-1)
        found = {i: (y, _writes(*member._parameters.values())) for i, (y, member) in enumerate(zip(outputs, self._members, strict=True))}
        call.x, call.writes, call.outputs = x, _writes(x), found
        return found.pop(place)[0]

    def _may_join(self) -> bool:
        """Whether their weights are one, they are converted as they were, and nobody may write to one before its layer is called."""
        if any([member._forward_pre_hooks for member in self._members]) or not self._owner.goes_with_members():
            return False
        return is_joined([own_parameter(member, "weight") for member in self._members])


def _writes(*tensors: torch.Tensor | None) -> int:
    """How often tensors were written to; a graph of ``torch.compile`` writes to none of these."""
    if torch.compiler.is_compiling():
        return 0
    count = 0
    for x in tensors:
        if x is not None and not x.is_inference():
            count += x._version
    return count
