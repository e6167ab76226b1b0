"""Functions that reduce and do more."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence

from fusible.lazy import dtypes
from fusible.lazy.dtypes import FLOATS, NUMBERS
from fusible.lazy.frontend import Tensor, TensorLike, constrained, normalize_dims
from fusible.lazy.ops.binary import maximum
from fusible.lazy.ops.cast import cast
from fusible.lazy.ops.reduce import Reduce, reduced, sum
from fusible.lazy.ops.unary import exp

__all__ = ["mean", "softmax", "var", "widened"]


def widened(input: Tensor) -> Tensor:
    """``input`` in float32 where it is of a 16-bit float, else itself: several operations then compute in float32, and the result is rounded once."""
    return cast(input, dtypes.float32) if input.dtype.itemsize == 2 else input


@constrained("mean", input="T1", returns="T1", T1=NUMBERS)
def mean(input: TensorLike, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """The mean over ``dim`` (an int, a sequence, or all dimensions); NaN over no elements. 16-bit floats are computed in float32.

    Integers give an integer: the sum in 64 bits divided by the count, truncated toward zero; 0 over no elements.
    """
    count = math.prod(input.shape[d] for d in normalize_dims(dim, input.ndim, "mean"))
    if input.dtype.is_integer:
        wide = cast(input, dtypes.int64 if input.dtype.kind == "int" else dtypes.uint64)
        return cast(sum(wide, dim, keepdim) / count, input.dtype)
    return cast(sum(widened(input), dim, keepdim) / count, input.dtype)


@constrained("var", input="T1", returns="T1", T1=FLOATS)
def var(input: TensorLike, dim: int | Sequence[int] | None = None, keepdim: bool = False, correction: float = 1) -> Tensor:
    """The variance over ``dim``: ``sum((x - mean(x))**2) / max(0, n - correction)`` over n elements. 16-bit floats are computed in float32.

    With as many elements as ``correction`` or fewer it is NaN or infinite.
    """
    count = math.prod(input.shape[d] for d in normalize_dims(dim, input.ndim, "var"))
    wide = widened(input)
    away = wide - mean(wide, dim, keepdim=True)
    left = float(builtins.max(count - correction, 0)) if isinstance(count, int) else maximum(cast(count, wide.dtype) - float(correction), 0.0)
    return cast(sum(away * away, dim, keepdim) / left, input.dtype)


@constrained("softmax", input="T1", returns="T1", T1=FLOATS)
def softmax(input: TensorLike, dim: int | None = None) -> Tensor:
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` along ``dim``, or over all elements. 16-bit floats are computed in float32, rounded once."""
    if 0 in input.shape:
        return input
    wide = widened(input)
    grown = exp(wide - reduced(Reduce.Kind.MAX, wide, dim, keepdim=True))
    return cast(grown / sum(grown, dim, keepdim=True), input.dtype)
