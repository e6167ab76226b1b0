"""Operands as plain tensors, and results as what the caller asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.errors import ArgumentError, expected
from fusible.tex.backends.torch_backend.arrays import wide
from fusible.tex.backends.torch_backend.block_formats import BLOCKS
from fusible.tex.formats import is_quantized, nominal
from fusible.tex.protocol import accumulator, check_given_output

__all__ = ["dense", "flat", "plain", "row_sum", "wide", "write"]

_PLAIN = (Tensor, torch.nn.Parameter)


dense = BLOCKS.dense


def plain(x: Any) -> Tensor:
    """``x`` itself, or its value where it is quantized (in its nominal dtype)."""
    return x if type(x) in _PLAIN or not is_quantized(x) else dense(x).to(nominal(x))


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
    check_given_output(out, result, dtype)
    if out.is_meta and not result.is_meta:  # to which torch copies nothing, and says nothing
        raise ArgumentError(expected("a tensor with data", of="the given output", got="one on meta", do="make it on another device"))
    return out.copy_(result)
