"""``x[...]``."""

from __future__ import annotations

from typing import Any

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.trace.ops.reshape import reshape
from fusible.lazy.trace.ops.slice import Flip, Slice

__all__ = ["getitem"]


@TENSOR_METHOD_REGISTRY("__getitem__")
def getitem(x: Tensor, index: Any) -> Tensor:
    """``x[index]`` with ints, slices (steps of either sign), ``...`` and ``None``, by numpy's rules.

    Raises ``ArgumentError`` for an int out of bounds or too many indices, and ``DTypeError`` for another kind of index: use ``gather`` to
    index with a tensor.
    """
    items = _expand(index if isinstance(index, tuple) else (index,), x)
    start, limit, stride, flipped = [], [], [], []
    shape: list[int] = []
    for item in items:
        if item is None:
            shape.append(1)
            continue
        dim = len(start)
        size = x.shape[dim]
        span = _span(item, size, dim)
        count = len(span)
        if count and span.step < 0:
            flipped.append(dim)
            span = span[::-1]
        first = span.start if count else 0
        start.append(first)
        limit.append(first + (count - 1) * span.step + 1 if count else first)
        stride.append(span.step if count > 1 else 1)
        if isinstance(item, slice):
            shape.append(count)
    result = x
    if limit != list(x.shape) or any(start) or any(s != 1 for s in stride):
        result = record(Slice(tuple(start), tuple(limit), tuple(stride)), result)
    if flipped:
        result = record(Flip(tuple(flipped)), result)
    return reshape(result, shape)


def _expand(items: tuple[Any, ...], x: Tensor) -> list[Any]:
    """One item per dimension of ``x``, and the ``None``s, with ``...`` replaced by full slices."""
    used = sum(item is not None and item is not Ellipsis for item in items)
    dots = sum(item is Ellipsis for item in items)
    if used > x.ndim or dots > 1:
        got = f"{used} indices and {dots} ellipses"
        raise ArgumentError(expected(f"at most {x.ndim} indices and one ellipsis", of=f"indexing {x.trace_tensor}", got=got, do="drop some"))
    full = [slice(None)] * (x.ndim - used)
    expanded: list[Any] = []
    for item in items if dots else (*items, Ellipsis):
        expanded += full if item is Ellipsis else [item]
    return expanded


def _span(item: Any, size: int, dim: int) -> range:
    """The positions that one int or slice names."""
    if isinstance(item, slice):
        try:
            return range(*item.indices(size))
        except (TypeError, ValueError) as error:
            raise ArgumentError(expected("integers and a step that is not 0", of="a slice", got=item, do="pass start:stop:step")) from error
    if isinstance(item, bool | Tensor) or not hasattr(item, "__index__"):
        got = type(item).__name__
        raise DTypeError(expected("an int, a slice, an ellipsis or None", of="an index", got=got, do="use gather or where for tensors and masks"))
    position = item.__index__()
    if not -size <= position < size:
        raise ArgumentError(
            expected(f"a position from {-size} to {size - 1}", of=f"an index into dimension {dim}", got=position, do="index within it")
        )
    position %= size
    return range(position, position + 1)
