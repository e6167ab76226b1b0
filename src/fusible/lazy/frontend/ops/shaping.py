"""Functions of shape that reshape, slice or join."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.lazy.frontend.arguments import normalize_dim, normalize_dims
from fusible.lazy.frontend.convert import TensorLike, as_tensor, promote
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.trace.ops.concatenate import concatenate
from fusible.lazy.trace.ops.reshape import reshape
from fusible.lazy.trace.ops.slice import Slice

__all__ = ["flatten", "split", "squeeze", "stack", "unsqueeze"]


@TENSOR_METHOD_REGISTRY("flatten")
def flatten(x: TensorLike, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """``x`` with the dimensions from ``start_dim`` to ``end_dim`` (included) made one."""
    x = as_tensor(x)
    if not x.ndim:
        return reshape(x, (1,))
    first, last = (normalize_dim(d, x.ndim, "flatten") for d in (start_dim, end_dim))
    if first > last:
        raise ArgumentError(expected("start_dim before end_dim", of="flatten", got=f"{start_dim} and {end_dim}", do="exchange them"))
    return reshape(x, [*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]])


@TENSOR_METHOD_REGISTRY("squeeze")
def squeeze(x: TensorLike, dims: Any = None) -> Tensor:
    """``x`` without the dimensions ``dims``, which have size 1; without all such dimensions by default. Raises ``ShapeError`` for another."""
    x = as_tensor(x)
    gone = [d for d, n in enumerate(x.shape) if n == 1] if dims is None else normalize_dims(dims, x.ndim, "squeeze")
    if any(x.shape[d] != 1 for d in gone):
        raise ShapeError(expected("dimensions of size 1", of="squeeze", got=f"{dims} of {x.trace_tensor}", do="reduce or index them"))
    return reshape(x, [n for d, n in enumerate(x.shape) if d not in gone])


@TENSOR_METHOD_REGISTRY("unsqueeze")
def unsqueeze(x: TensorLike, dim: int) -> Tensor:
    """``x`` with a dimension of size 1 inserted at position ``dim`` of the result."""
    x = as_tensor(x)
    at = normalize_dim(dim, x.ndim + 1, "unsqueeze")
    return reshape(x, [*x.shape[:at], 1, *x.shape[at:]])


@TENSOR_METHOD_REGISTRY("split")
def split(x: TensorLike, num_split_or_sizes: int | Sequence[int], dim: int = 0) -> list[Tensor]:
    """``x`` cut along ``dim`` into a number of equal parts, or into parts of the given sizes. Raises ``ShapeError`` where they do not add up."""
    x = as_tensor(x)
    at = normalize_dim(dim, x.ndim, "split")
    total = x.shape[at]
    if isinstance(num_split_or_sizes, int):
        if num_split_or_sizes < 1 or total % num_split_or_sizes:
            raise ShapeError(expected(f"a divisor of {total}", of="the number of parts of split", got=num_split_or_sizes, do="pass sizes"))
        sizes = [total // num_split_or_sizes] * num_split_or_sizes
    else:
        sizes = list(num_split_or_sizes)
        if sum(sizes) != total or any(n < 0 for n in sizes):
            raise ShapeError(expected(f"sizes that add up to {total}", of="split", got=sizes, do="cover the dimension exactly"))
    parts, start = [], 0
    for size in sizes:
        low = tuple(start if d == at else 0 for d in range(x.ndim))
        high = tuple(start + size if d == at else n for d, n in enumerate(x.shape))
        parts.append(record(Slice(low, high, (1,) * x.ndim), x))
        start += size
    return parts


def stack(tensors: Sequence[TensorLike], dim: int = 0) -> Tensor:
    """``tensors`` of one shape joined along a new dimension ``dim``."""
    return concatenate([unsqueeze(t, dim) for t in promote(*tensors)], dim)
