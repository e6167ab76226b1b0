"""Attention's tensors as ``[b, h, s, d]``, from any format and back."""

from __future__ import annotations

from fusible import lazy
from fusible.lazy import Tensor

__all__ = ["from_heads_first", "heads_first"]

_TO_HEADS_FIRST = {"SBHD": (1, 2, 0, 3), "BSHD": (0, 2, 1, 3), "BHSD": (0, 1, 2, 3)}
_FROM_HEADS_FIRST = {"SBHD": (2, 0, 1, 3), "BSHD": (0, 2, 1, 3), "BHSD": (0, 1, 2, 3)}


def heads_first(x: Tensor, name: str) -> Tensor:
    """``[b, h, s, d]`` of a tensor in any format; THD is one batch of all its tokens."""
    if name == "THD":
        return lazy.unsqueeze(lazy.permute(x, (1, 0, 2)), 0)
    return lazy.permute(x, _TO_HEADS_FIRST[name])


def from_heads_first(x: Tensor, name: str) -> Tensor:
    """The inverse of ``heads_first``."""
    if name == "THD":
        return lazy.permute(lazy.squeeze(x, 0), (1, 0, 2))
    return lazy.permute(x, _FROM_HEADS_FIRST[name])
