"""Operands as plain lazy tensors, and results as what the caller asked for."""

from __future__ import annotations

import math
from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.arrays import fp32
from fusible.tex.backends.xla.block_formats import BLOCKS
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.formats import is_quantized
from fusible.tex.protocol import check_given_output

__all__ = ["dense", "flat", "fp32", "nominal", "plain", "row_sum", "write"]


dense = BLOCKS.dense


def plain(x: Any) -> Tensor:
    """``x`` itself, or its value where it is quantized (in its nominal dtype)."""
    return lazy.cast(dense(x), nominal(x)) if is_quantized(x) else x


def nominal(x: Any) -> lazy.dtype:
    """The dtype of a tensor, or the unquantized one that a quantized tensor stands for."""
    if not is_quantized(x):
        return x.dtype
    dtype = getattr(x, "_dtype", None)
    return lazy.float32 if dtype is None else to_lazy(dtype)


def flat(x: Tensor) -> Tensor:
    """``[*leading, last]`` as the matrix ``[outer, last]``."""
    return lazy.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def row_sum(x: Tensor) -> Tensor:
    """The sum over all rows in fp32: ``[*leading, last] -> [last]``."""
    return lazy.sum(fp32(flat(x)), 0)


def write(result: Tensor, dtype: lazy.dtype, out: Tensor | None = None) -> Tensor:
    """``result`` rounded to ``dtype``; as the new value of ``out``, where given."""
    rounded = lazy.cast(result, dtype)
    if out is not None:
        check_given_output(out, rounded, dtype)
    return rounded if out is None else out.assign_(rounded)
