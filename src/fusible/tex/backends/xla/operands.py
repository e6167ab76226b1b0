"""Operands as plain lazy tensors, and results as what the caller asked for."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusible import lazy
from fusible.errors import ArgumentError, DTypeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.fp8 import decode
from fusible.tex.protocol import is_quantized, to_torch, transposed

__all__ = ["dense", "flat", "fp32", "nominal", "plain", "row_sum", "to_lazy", "write"]

_FROM_TORCH: dict[torch.dtype, lazy.dtype] = {
    torch.uint8: lazy.uint8,
    torch.int32: lazy.int32,
    torch.int64: lazy.int64,
    torch.float32: lazy.float32,
    torch.float16: lazy.float16,
    torch.bfloat16: lazy.bfloat16,
    torch.float8_e4m3fn: lazy.float8,
    torch.float8_e5m2: lazy.float8e5m2,
    torch.bool: lazy.bool,
}


def to_lazy(dtype: Any) -> lazy.dtype:
    """The lazy dtype of a lazy dtype, a ``torch.dtype``, a ``DType`` (NVIDIA's or ours) or its integer value."""
    if isinstance(dtype, lazy.dtype):
        return dtype
    found = _FROM_TORCH.get(to_torch(dtype))
    if found is None:
        raise DTypeError(expected("a type that lazy tensors have", of="a tex call on lazy tensors", got=repr(dtype), do="cast to another type"))
    return found


def fp32(x: Tensor) -> Tensor:
    """``x`` in fp32."""
    return lazy.cast(x, lazy.float32)


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
    """``data * scale_inv`` of a quantized tensor, in fp32."""
    if x._data is not None:
        return decode(x._data, x._fp8_dtype) * x._scale_inv
    data = transposed(x)
    if data is None:
        raise ArgumentError(expected("data or transposed data", of="a quantized tensor", got="neither", do="quantize it again"))
    values = decode(data, x._fp8_dtype) * x._scale_inv
    return lazy.permute(values, *range(1, values.ndim), 0)


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
