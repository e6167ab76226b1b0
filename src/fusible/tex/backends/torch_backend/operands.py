"""Operands as plain tensors, and results as what the caller asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.backends.torch_backend.arrays import wide
from fusible.tex.backends.torch_backend.block_formats import block_dense
from fusible.tex.backends.torch_backend.fp8 import decode
from fusible.tex.formats import FLOAT8, format_of, is_quantized, logical_shape, nominal, transposed
from fusible.tex.protocol import accumulator

__all__ = ["dense", "flat", "plain", "row_sum", "wide", "write"]

_PLAIN = (Tensor, torch.nn.Parameter)


def plain(x: Any) -> Tensor:
    """``x`` itself, or its value where it is quantized (in its nominal dtype)."""
    return x if type(x) in _PLAIN or not is_quantized(x) else dense(x).to(nominal(x))


def dense(x: Any) -> Tensor:
    """The value of a quantized tensor of any format in fp32: ``data * scale_inv``."""
    if format_of(x) is not FLOAT8:
        return block_dense(x)
    scale_inv = x._scale_inv if len(logical_shape(x)) else x._scale_inv.view(())
    if x._data is not None:
        return decode(x._data, x._fp8_dtype).mul_(scale_inv)
    data = transposed(x)
    if data is None:
        raise ArgumentError(expected("data or transposed data", of="a quantized tensor", got="neither", do="quantize it again"))
    return decode(data, x._fp8_dtype).mul_(scale_inv).movedim(0, -1)


def flat(x: Tensor) -> Tensor:
    """``[*leading, last]`` as the matrix ``[outer, last]``."""
    if x.dim() == 2:
        return x
    last = x.shape[-1]
    return x.reshape(-1, last) if last else x.reshape(x.shape[:-1].numel(), 0)


def row_sum(x: Tensor) -> Tensor:
    """The sum over all rows, wide: ``[*leading, last] -> [last]``."""
    return flat(x).sum(0, dtype=accumulator(x.dtype))


def write(result: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """``result`` rounded to ``dtype``; into ``out``, where given."""
    if out is None:
        return result if result.dtype is dtype else result.to(dtype)
    if out.shape != result.shape:
        raise ShapeError(expected(f"shape {list(result.shape)}", of="the given output", got=list(out.shape), do="pass a tensor of that shape"))
    if out.dtype is not dtype:
        raise DTypeError(expected(f"{dtype}", of="the given output", got=out.dtype, do="pass a tensor of that dtype"))
    if out.is_meta and not result.is_meta:  # to which torch copies nothing, and says nothing
        raise ArgumentError(expected("a tensor with data", of="the given output", got="one on meta", do="make it on another device"))
    return out.copy_(result)
