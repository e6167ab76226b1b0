"""Functions that reduce and do more."""

from __future__ import annotations

import math
from typing import Any

from fusible.errors import DTypeError, expected
from fusible.lazy import dtypes
from fusible.lazy.frontend.arguments import normalize_dims
from fusible.lazy.frontend.convert import TensorLike, as_tensor
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor
from fusible.lazy.trace.ops.cast import cast
from fusible.lazy.trace.ops.reduce import max, sum
from fusible.lazy.trace.ops.unary import exp

__all__ = ["mean", "softmax"]


def _wide(x: TensorLike, what: str) -> Tensor:
    x = as_tensor(x)
    if not x.dtype.is_floating:
        raise DTypeError(expected("a floating dtype", of=f"the operand of {what}", got=x.trace_tensor, do="cast it first"))
    return cast(x, dtypes.float32) if x.dtype.itemsize == 2 else x


@TENSOR_METHOD_REGISTRY("mean")
def mean(x: TensorLike, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The mean over ``dim`` (an int, a sequence, or all dimensions) of floats; NaN over no elements. 16-bit floats are computed in float32."""
    x = as_tensor(x)
    count = math.prod(x.shape[d] for d in normalize_dims(dim, x.ndim, "mean"))
    return cast(sum(_wide(x, "mean"), dim, keepdim) / float(count), x.dtype)


@TENSOR_METHOD_REGISTRY("softmax")
def softmax(x: TensorLike, dim: int = -1) -> Tensor:
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` along ``dim`` of floats. 16-bit floats are computed in float32 and rounded once."""
    x = as_tensor(x)
    wide = _wide(x, "softmax")
    if 0 in x.shape:
        return x
    grown = exp(wide - max(wide, dim, keepdim=True))
    return cast(grown / sum(grown, dim, keepdim=True), x.dtype)
