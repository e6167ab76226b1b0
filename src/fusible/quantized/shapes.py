"""Shapes of views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["resolved"]


def resolved(shape: Iterable[int], have: Sequence[int]) -> tuple[int, ...]:
    """``shape`` with the size that -1 stands for in a view of a tensor of shape ``have``."""
    wanted = tuple(shape)
    if -1 not in wanted:
        return wanted
    known, elements = 1, 1
    for size in wanted:
        known *= size if size != -1 else 1
    for size in have:
        elements *= size
    return tuple(elements // max(known, 1) if size == -1 else size for size in wanted)
