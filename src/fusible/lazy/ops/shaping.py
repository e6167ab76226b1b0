"""Functions of shape that reshape, slice or join."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.lazy.assumptions import holds
from fusible.lazy.dims import SizeLike, minimum
from fusible.lazy.dtypes import ALL
from fusible.lazy.frontend import Tensor, TensorLike, as_shape, constrained, normalize_dim, normalize_dims, record
from fusible.lazy.ops.concatenate import concatenate
from fusible.lazy.ops.reshape import reshape
from fusible.lazy.ops.slice import Slice

__all__ = ["flatten", "split", "squeeze", "stack", "unsqueeze"]


@constrained("flatten", input="T1", returns="T1", T1=ALL)
def flatten(input: TensorLike, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """``input`` with the dimensions from ``start_dim`` to ``end_dim`` (included) made one."""
    if not input.ndim:
        return reshape(input, (1,))
    first, last = (normalize_dim(d, input.ndim, "flatten") for d in (start_dim, end_dim))
    if first > last:
        raise ArgumentError(expected("start_dim before end_dim", of="flatten", got=f"{start_dim} and {end_dim}", do="exchange them"))
    return reshape(input, [*input.shape[:first], math.prod(input.shape[first : last + 1]), *input.shape[last + 1 :]])


@constrained("squeeze", input="T1", returns="T1", T1=ALL)
def squeeze(input: TensorLike, dims: int | Sequence[int] | None = None) -> Tensor:
    """``input`` without the dimensions ``dims``, which have size 1; without all such dimensions by default. Raises ``ShapeError`` for another."""
    gone = [d for d, n in enumerate(input.shape) if n == 1] if dims is None else normalize_dims(dims, input.ndim, "squeeze")
    if not all(holds(input.trace_tensor.shape[d], "==", 1, "squeeze") for d in gone):
        raise ShapeError(expected("dimensions of size 1", of="squeeze", got=f"{dims} of {input.trace_tensor}", do="reduce or index them"))
    return reshape(input, [n for d, n in enumerate(input.shape) if d not in gone])


@constrained("unsqueeze", input="T1", returns="T1", T1=ALL)
def unsqueeze(input: TensorLike, dim: int) -> Tensor:
    """``input`` with a dimension of size 1 inserted at position ``dim`` of the result."""
    at = normalize_dim(dim, input.ndim + 1, "unsqueeze")
    return reshape(input, [*input.shape[:at], 1, *input.shape[at:]])


@constrained("split", input="T1", returns="T1", T1=ALL)
def split(input: TensorLike, num_split_or_sizes: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """``input`` cut along ``dim`` into a number of equal parts, or into parts of the given sizes, whose sum is the size of the dimension.

    Where the number ``n`` does not divide the size, parts have ``ceil(size / n)`` elements, and the last ones have the remaining ones: fewer, or
    none. Raises ``ShapeError`` for a number below 1 and for sizes that do not add up.
    """
    at = normalize_dim(dim, input.ndim, "split")
    shape = input.trace_tensor.shape
    total = shape[at]
    if isinstance(num_split_or_sizes, int):
        if num_split_or_sizes < 1:
            raise ShapeError(expected("at least 1", of="the number of parts of split", got=num_split_or_sizes, do="pass a number or sizes"))
        sizes = _parts(total, num_split_or_sizes)
    else:
        sizes = list(as_shape(num_split_or_sizes))
        if not holds(sum(sizes), "==", total, "split"):
            raise ShapeError(expected(f"sizes that add up to {total}", of="split", got=sizes, do="cover the dimension exactly"))
    parts, start = [], 0
    for size in sizes:
        low = tuple(start if d == at else 0 for d in range(input.ndim))
        high = tuple(start + size if d == at else n for d, n in enumerate(shape))
        parts.append(record(Slice(low, high, (1,) * input.ndim), input))
        start += size
    return tuple(parts)


def _parts(total: SizeLike, count: int) -> list[SizeLike]:
    """The sizes of ``count`` parts of a dimension."""
    if total % count == 0:
        return [total // count] * count
    whole = -(-total // count)
    ends = [0, whole, *(minimum(whole * i, total) for i in range(2, count)), total]
    return [b - a for a, b in itertools.pairwise(ends)]


@constrained(tensors="[T1]", returns="T1", T1=ALL)
def stack(tensors: Sequence[TensorLike], dim: int = 0) -> Tensor:
    """``tensors`` of one shape joined along a new dimension ``dim`` of the result.

    Raises ``ShapeError`` where shapes differ and ``ArgumentError`` for an empty sequence.
    """
    if not tensors:
        raise ArgumentError(expected("at least one tensor", of="stack", got="an empty sequence", do="pass the tensors to join"))
    first, *others = [t.trace_tensor for t in tensors]
    for t in others:
        if len(t.shape) != len(first.shape) or not all(holds(n, "==", m, "stack") for n, m in zip(first.shape, t.shape, strict=True)):
            raise ShapeError(expected("one shape", of="the tensors of stack", got=f"{first} and {t}", do="reshape or pad them"))
    return concatenate([unsqueeze(t, dim) for t in tensors], dim)
