"""Checks that a call's outputs share no memory with one another, nor, where declared, with its inputs, and that no output overlaps itself.

They run before anything is written: torch refuses to write to an overlapping tensor, but by then other tensors may have been written. Functions
declare what must be disjoint (``interface.declare.function``: ``disjoint``, ``alone``). A backend that computes a function in several steps, where a
later step reads what an earlier one wrote, wraps its method by ``writing_without_overlap``. A native kernel checks by itself
(``cppsrc/include/fusible/overlap.hpp``).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.errors import ArgumentError, expected
from fusible.tex.interface.declare import DECLARATIONS, Declaration
from fusible.tex.operands import not_dense

__all__ = ["check_no_inner_overlap", "check_outputs_disjoint", "overlaps_itself", "surely_disjoint", "writing_without_overlap"]

_PLAIN = (Tensor, torch.nn.Parameter)


class _Span(NamedTuple):
    """Where a tensor lies, whether it is written and ``alone``, and which it is: an argument's name, and its places in lists."""

    begin: int
    end: int
    written: bool
    alone: bool
    argument: str
    places: tuple[int, ...]
    x: Tensor

    def __str__(self) -> str:
        return self.argument + "".join(f"[{place}]" for place in self.places)


def writing_without_overlap(method: Callable[..., Any], declaration: Declaration) -> Callable[..., Any]:
    """``method`` of the function, which raises ``ArgumentError`` where a tensor that it writes shares memory as the declaration forbids."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_outputs_disjoint(declaration.name, declaration.signature.bind(*args, **kwargs).arguments)
        return method(self, *args, **kwargs)

    return call


def surely_disjoint(lists: Iterable[Sequence[Any]]) -> bool:
    """Whether all tensors of these lists are plain ones without gaps, and no two share memory: told in a fraction of the time of a full check."""
    places: list[tuple[int, int]] = []
    for tensors in lists:
        for x in tensors:
            if type(x) not in _PLAIN or not x.is_contiguous():
                return False
            places.append((x.data_ptr(), x.nbytes))
    places.sort()
    return all(begin + size <= after for (begin, size), (after, _) in pairwise(places) if size)


def check_outputs_disjoint(function: str, arguments: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError`` where a written tensor of a call shares memory as the declaration of ``function`` forbids."""
    declaration = DECLARATIONS[function]
    spans: list[_Span] = []
    for name, value in arguments.items():
        if not (declaration.alone or name in declaration.disjoint or any(listed.startswith(f"{name}[") for listed in declaration.disjoint)):
            continue  # what is only read matters where something is to be alone
        if issubclass(type(value), (list, tuple, Tensor)):  # all that is asked of any other value is its type
            _collect(spans, value, name, (), name in declaration.disjoint, name in declaration.alone, declaration.disjoint)
    for span in spans:
        if span.x.layout is not torch.strided or (span.written and not span.x.is_contiguous()):
            check_no_inner_overlap(span.x, f"{span} of {function}")
    spans.sort(key=_begin)
    for i, one in enumerate(spans):
        end, written, alone = one[1:4]
        for other in spans[i + 1 :]:
            if other[0] >= end:
                break
            both = written and other.written
            if (both or ((written or other.written) and (alone or other.alone))) and _meet(one.x, other.x):
                first, second = (one, other) if written else (other, one)
                of = f"{first} of {function}"
                raise ArgumentError(expected("memory of its own", of=of, got=f"that of {second}", do="pass a tensor that shares none"))


_begin = operator.itemgetter(0)


def _collect(spans: list[_Span], value: Any, name: str, places: tuple[int, ...], disjoint: bool, alone: bool, listed: tuple[str, ...]) -> None:
    """Add the plain tensors of an argument; ``listed`` may name one of its lists (``tensor_lists[1]``)."""
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _collect(spans, item, name, (*places, i), disjoint or (not places and f"{name}[{i}]" in listed), alone, listed)
    elif type(value) in _PLAIN and value.layout is not torch.strided:
        spans.append(_Span(0, 0, disjoint or alone, alone, name, places, value))
    elif type(value) in _PLAIN and value.numel() and value.device.type != "meta":
        begin = value.data_ptr()
        size = value.nbytes if value.is_contiguous() else _extent(value)
        spans.append(_Span(begin, begin + size, disjoint or alone, alone, name, places, value))


def check_no_inner_overlap(x: Tensor, of: str) -> None:
    """Raise ``ArgumentError`` unless ``x``, which is written, is dense, and each of its elements has memory of its own."""
    if x.layout is not torch.strided:
        raise not_dense(x, of)
    if overlaps_itself(x):
        raise ArgumentError(expected("memory of its own for each element", of=of, got=f"strides {list(x.stride())}", do="pass x.clone()"))


def overlaps_itself(x: Tensor) -> bool:
    """Whether elements of a dense tensor share memory: an expanded one, or windows that overlap. Of strides that do not nest that is assumed."""
    if not x.numel() or x.is_contiguous():
        return False
    reach = 1
    for stride, length in sorted((stride, length) for stride, length in zip(x.stride(), x.shape, strict=True) if length > 1):
        if stride < reach:
            return True
        reach += (length - 1) * stride
    return False


def _extent(x: Tensor) -> int:
    """The bytes from the first element of a tensor to the end of the last."""
    return (1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _meet(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors whose extents meet have an element in common; of tensors without gaps that is so."""
    if x.is_contiguous() and y.is_contiguous():
        return True
    if x.dim() != y.dim() or x.stride() != y.stride() or x.element_size() != y.element_size():
        return True  # who knows: tensors of different strides are told apart by their extents alone
    distance, width = y.data_ptr() - x.data_ptr(), x.element_size()
    return _within(distance, [(stride * width, m, n) for stride, m, n in zip(x.stride(), x.shape, y.shape, strict=True)], width)


def _within(distance: int, dims: list[tuple[int, int, int]], width: int) -> bool:
    """Whether whole steps of ``dims`` (bytes, and the sizes of both tensors), of which each is longer than the rest together, make the distance."""
    if not dims:
        return -width < distance < width
    (step, m, n), rest = dims[0], dims[1:]
    if not step:
        return _within(distance, rest, width)
    steps = distance // step
    return any(1 - n <= k <= m - 1 and _within(distance - k * step, rest, width) for k in (steps, steps + 1))
