"""Operands as plain lazy tensors, and results as what the caller asked for."""

from __future__ import annotations

import math
from typing import Any

from fusible import lazy
from fusible.errors import ArgumentError, DTypeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.arrays import fp32
from fusible.tex.backends.xla.block_formats import block_dense
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.fp8 import decode
from fusible.tex.formats import FLOAT8, format_of, is_quantized, transposed

__all__ = ["dense", "flat", "fp32", "nominal", "plain", "row_sum", "write"]


def plain(x: Any) -> Tensor:
    """``x`` itself, or its value where it is quantized (in its nominal dtype)."""
    return lazy.cast(dense(x), nominal(x)) if is_quantized(x) else x


def nominal(x: Any) -> lazy.dtype:
    """The dtype of a tensor, or the unquantized one that a quantized tensor stands for."""
    if not is_quantized(x):
        return x.dtype
    dtype = getattr(x, "_dtype", None)
    return lazy.float32 if dtype is None else to_lazy(dtype)


def dense(x: Any) -> Tensor:
    """The value of a quantized tensor of any format in fp32: ``data * scale_inv``."""
    if format_of(x) is not FLOAT8:
        return block_dense(x)
    if x._data is not None:
        return decode(x._data, x._fp8_dtype) * x._scale_inv
    data = transposed(x)
    if data is None:
        raise ArgumentError(expected("data or transposed data", of="a quantized tensor", got="neither", do="quantize it again"))
    values = decode(data, x._fp8_dtype) * x._scale_inv
    return lazy.permute(values, (*range(1, values.ndim), 0))


def flat(x: Tensor) -> Tensor:
    """``[*leading, last]`` as the matrix ``[outer, last]``."""
    return lazy.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def row_sum(x: Tensor) -> Tensor:
    """The sum over all rows in fp32: ``[*leading, last] -> [last]``."""
    return lazy.sum(fp32(flat(x)), 0)


def write(result: Tensor, dtype: lazy.dtype, out: Tensor | None = None) -> Tensor:
    """``result`` rounded to ``dtype``; as the new value of ``out``, where given."""
    rounded = lazy.cast(result, dtype)
    if out is None:
        return rounded
    if out.shape != rounded.shape:
        raise ArgumentError(expected(f"shape {list(rounded.shape)}", of="the given output", got=list(out.shape), do="pass a tensor of that shape"))
    if out.dtype is not dtype:
        raise DTypeError(expected(f"{dtype}", of="the given output", got=out.dtype, do="pass a tensor of that dtype"))
    return out.assign_(rounded)
