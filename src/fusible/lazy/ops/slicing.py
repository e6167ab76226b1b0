"""Blocks of a tensor: ``x[1, 2:, ::-1, None]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.lazy.assumptions import holds
from fusible.lazy.dims import Size, SizeLike, bounds, maximum, minimum, size_of
from fusible.lazy.frontend import Tensor, record
from fusible.lazy.ops.reshape import reshape
from fusible.lazy.ops.slice import Flip, Slice

__all__ = ["sliced"]


def sliced(x: Tensor, items: Sequence[Any]) -> Tensor:
    """``x`` indexed by one int or slice for each dimension, with ``None`` among them where one is new.

    Raises ``ArgumentError`` for an int out of bounds, and ``DTypeError`` for another kind of index.
    """
    sizes = x.trace_tensor.shape
    start, limit, stride, flipped = [], [], [], []
    shape: list[int] = []
    for item in items:
        if item is None:
            shape.append(1)
            continue
        dim = len(start)
        cut = _cut(item, sizes[dim], dim)
        start.append(cut.start)
        limit.append(cut.limit)
        stride.append(abs(cut.step))
        if cut.step < 0:
            flipped.append(dim)
        if isinstance(item, slice):
            shape.append(cut.count)
    result = x
    if limit != list(sizes) or any(n != 0 for n in start) or any(s != 1 for s in stride):
        result = record(Slice(tuple(start), tuple(limit), tuple(stride)), result)
    if flipped:
        result = record(Flip(tuple(flipped)), result)
    return reshape(result, shape)


class _Cut(NamedTuple):
    """``count`` elements from ``start`` to below ``limit``, every ``abs(step)``-th, and in reverse where ``step`` is negative."""

    start: int
    limit: int
    step: int
    count: int


def _cut(item: Any, size: SizeLike, dim: int) -> _Cut:
    """The elements that one int or slice names."""
    if isinstance(item, slice):
        ends = [None if n is None else size_of(n) for n in (item.start, item.stop)]
        if type(size) is not int or any(isinstance(n, Size) for n in ends):
            return _cut_unknown(item, ends, size)
        return _cut_known(item, size)
    position: Any = size_of(item)
    if position is None and (isinstance(item, bool | Tensor) or not hasattr(item, "__index__")):
        got = type(item).__name__
        raise DTypeError(expected("an int, a slice, an ellipsis, None, a tensor or a list", of="an index", got=got, do="pass one of these"))
    position = item.__index__() if position is None else position
    of = f"an index into dimension {dim}"
    known = type(position) is type(size) is int
    if not (-size <= position < size if known else holds(position, ">=", -size, of) and holds(size - 1, ">=", position, of)):
        raise ArgumentError(expected(f"a position from {-size} to {size - 1}", of=of, got=position, do="index within it"))
    if isinstance(position, Size):
        position = position + size if bounds(position)[1] < 0 else position
    elif position < 0:
        position += size
    return _Cut(position, position + 1, 1, 1)


def _cut_known(item: slice, size: int) -> _Cut:
    """A slice of sizes that are ints."""
    try:
        span = range(*item.indices(size))
    except (TypeError, ValueError) as error:
        raise ArgumentError(expected("integers and a step that is not 0", of="a slice", got=item, do="pass start:stop:step")) from error
    count = len(span)
    low = span if span.step > 0 else span[::-1]
    first = low.start if count else 0
    step = span.step if count > 1 else 1
    return _Cut(first, first + (count - 1) * abs(span.step) + 1 if count else first, step, count)


def _cut_unknown(item: slice, ends: list[SizeLike | None], size: SizeLike) -> _Cut:
    """A slice where a size is only known to a call: the same rules, as expressions."""
    step = 1 if item.step is None else size_of(item.step)
    strange = any(end is None and end_of_item is not None for end, end_of_item in zip(ends, (item.start, item.stop), strict=True))
    if not isinstance(step, int) or step == 0 or strange:
        raise ArgumentError(expected("sizes and a step that is an int other than 0", of="a slice", got=item, do="pass start:stop:step"))
    low, high = (0, size) if step > 0 else (-1, size - 1)
    start, stop = (end_of_item if end_of_item is None else _within(end_of_item, size, low, high) for end_of_item in ends)
    start = (low if step > 0 else high) if start is None else start
    stop = (high if step > 0 else low) if stop is None else stop
    distance = maximum(stop - start if step > 0 else start - stop, 0)
    count = -(-distance // abs(step))
    first = start if step > 0 else minimum(start - (count - 1) * -step, size)
    limit = first + distance if step == 1 else maximum(first + (count - 1) * abs(step) + 1, first)
    return _Cut(first, limit, step, count)


def _within(end: SizeLike, size: SizeLike, low: SizeLike, high: SizeLike) -> SizeLike:
    """An end of a slice as a position: counted from the end of the dimension where it is negative, and no further than ``low`` or ``high``."""
    negative = end < 0 if type(end) is int else not holds(end, ">=", 0, "the end of a slice")
    return maximum(end + size, low) if negative else minimum(end, high)
