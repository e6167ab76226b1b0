"""Checks of arguments that several functions share."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.lazy.assumptions import holds
from fusible.lazy.dims import SizeLike, size_of
from fusible.lazy.printing import Shape, shown

__all__ = ["as_shape", "normalize_dim", "normalize_dims"]


def as_shape(shape: Any, of: str = "a shape") -> Shape:
    """A shape given as a size or a sequence of sizes (ints, whole floats, or sizes of a dynamic dimension).

    Raises ``DTypeError`` for anything else and ``ShapeError`` for a negative size. ``of`` is what errors call the shape.
    """
    if type(shape) is tuple and all([type(n) is int and n >= 0 for n in shape]):
        return shape
    alone = size_of(shape)
    if isinstance(shape, str | set | frozenset | Mapping):
        raise DTypeError(expected("an int or a sequence of ints", of=of, got=shown(shape), do="pass for instance (2, 3)"))
    try:
        dims = (alone,) if alone is not None else tuple(map(_as_size, shape))
    except (TypeError, AttributeError):
        raise DTypeError(expected("an int or a sequence of ints", of=of, got=shown(shape), do="pass for instance (2, 3)")) from None
    if any(d < 0 if type(d) is int else not holds(d, ">=", 0, "a shape") for d in dims):
        raise ShapeError(expected("sizes of at least 0", of=of, got=str(dims), do="pass the sizes explicitly"))
    return dims  # type: ignore[return-value] - see Shape


def _as_size(size: Any) -> SizeLike:
    found = size_of(size)
    if found is not None:
        return found
    whole = isinstance(size, float) and size.is_integer()  # n / 2 of a size that is known, where that of a dynamic one is a size
    return int(size) if whole else operator.index(size)  # pyright: ignore[reportArgumentType] - a float raises


def normalize_dim(dim: Any, ndim: int, what: str) -> int:
    """``dim`` counted from the front; raises ``ArgumentError`` where the tensor has no such dimension."""
    try:
        index = int(dim.__index__())
    except AttributeError:
        raise DTypeError(expected("an int", of=f"the dimension of {what}", got=shown(dim), do="pass one dimension as an int")) from None
    if not -ndim <= index < ndim:
        span = f"a dimension from {-ndim} to {ndim - 1}" if ndim else "no dimension"
        raise ArgumentError(expected(span, of=f"{what} on a tensor with {ndim} dimensions", got=index, do="pass one that exists"))
    return index % ndim


def normalize_dims(dims: int | Sequence[int] | None, ndim: int, what: str) -> tuple[int, ...]:
    """Dimensions given as ``None`` (all), an int or a sequence, counted from the front and without repetition."""
    if dims is None:
        return tuple(range(ndim))
    given: Sequence[Any] = dims if isinstance(dims, list | tuple) else (dims,)
    found = tuple(normalize_dim(d, ndim, what) for d in given)
    if len(set(found)) != len(found):
        raise ArgumentError(expected("distinct dimensions", of=what, got=str(tuple(given)), do="name each dimension once"))
    return found
