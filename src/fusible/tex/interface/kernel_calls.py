"""Calls of native kernels as data: what a specialized call comes to where it is nothing else.

Calls that are data need no Python between them: a replay puts those that follow one another into one native program. ``SpecializedCall.compute`` is
the same, for one call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Buffer", "KernelCall", "KernelCalls", "Operand", "View", "as_data", "view_of"]

Sizes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor that the caller gives, by its number among them, and how it lies: strides in elements."""

    number: int
    dtype: torch.dtype
    shape: Sizes
    strides: Sizes


@dataclass(frozen=True, eq=False)
class Buffer:
    """A contiguous tensor of which nothing is known before a kernel has written it."""

    dtype: torch.dtype
    shape: Sizes

    @property
    def strides(self) -> Sizes:
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))


@dataclass(frozen=True, eq=False)
class View:
    """A view of another tensor's memory: ``offset`` bytes behind its beginning."""

    of: Any
    offset: int
    dtype: torch.dtype
    shape: Sizes
    strides: Sizes


class KernelCall(NamedTuple):
    """``function(**arguments)``, one of ``fusible.cpp_extensions``; or ``copy(src, dst)`` in the order of src's elements, ``zero(dst)``,
    ``quotient(src, by, dst)`` in fp32, ``round(src, dst)`` of fp32 to bf16. Those of its arguments that are tensors are operands, buffers or views;
    the others are the same each time."""

    function: str
    arguments: Mapping[str, Any]


class KernelCalls(NamedTuple):
    """``calls`` in order, and what comes of them: an operand, a buffer, a view, None, or a list of such."""

    calls: tuple[KernelCall, ...]
    result: Any


def view_of(of: Tensor | Buffer, view: Tensor) -> View:
    """``view``, which lies in the memory of ``of``; or, of a buffer, as it lies in a tensor whose first element is its first."""
    begin = int(of.storage_offset()) * of.element_size() if isinstance(of, Tensor) else 0
    return View(of, int(view.storage_offset()) * view.element_size() - begin, view.dtype, tuple(view.shape), view.stride())


def as_data(calls: Iterable[KernelCall], result: Any) -> tuple[tuple[Tensor, ...], KernelCalls]:
    """The tensors in ``calls`` and ``result``, in the order in which they come, and both with an ``Operand`` for each of these."""
    tensors: list[Tensor] = []
    seen: dict[int, Any] = {}
    listed = [KernelCall(function, {name: _described(x, tensors, seen) for name, x in arguments.items()}) for function, arguments in calls]
    kernels = KernelCalls(tuple(listed), _described(result, tensors, seen))
    return tuple(tensors), kernels


def _described(x: Any, tensors: list[Tensor], seen: dict[int, Any]) -> Any:
    if isinstance(x, list):
        return [_described(item, tensors, seen) for item in x]
    if not isinstance(x, (Tensor, View)):
        return x
    if id(x) not in seen:
        if isinstance(x, View):
            seen[id(x)] = View(_described(x.of, tensors, seen), x.offset, x.dtype, x.shape, x.strides)
        else:
            seen[id(x)] = Operand(len(tensors), x.dtype, tuple(x.shape), x.stride())
            tensors.append(x)
    return seen[id(x)]
