"""Shapes of views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fusible import tex
from fusible.errors import ArgumentError, expected

__all__ = ["resolved", "size_of", "viewed"]


def viewed(data: Any, shape: tuple[int, ...]) -> Any:
    """An array of any framework with another shape; of a torch tensor a view."""
    return data.view(shape) if isinstance(data, torch.Tensor) else tex.prim.reshape(data, shape)


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


def size_of(shape: Sequence[int], dim: int | None, of: str) -> Any:
    """``shape``, or its size in a dimension. Raises ``ArgumentError`` for a dimension that it lacks."""
    if dim is None:
        return shape
    if not -len(shape) <= dim < len(shape):
        raise ArgumentError(expected(f"a dimension of {list(shape)}", of=f"dim of {of}.size", got=dim, do="pass one"))
    return shape[dim]
