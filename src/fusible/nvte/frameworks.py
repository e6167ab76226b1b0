"""The element types of the frameworks whose tensors stand behind ``nvte.Tensor``: torch's and the lazy compiler's."""

from __future__ import annotations

from typing import Any

import torch

from fusible import lazy
from fusible.errors import DTypeError, expected
from fusible.nvte.dtype import DType

__all__ = ["nvte_dtype", "te_to_torch_dtype", "torch_to_te_dtype"]

_TORCH = {
    torch.uint8: DType.Byte,
    torch.int32: DType.Int32,
    torch.int64: DType.Int64,
    torch.float64: DType.Float64,
    torch.float32: DType.Float32,
    torch.float16: DType.Float16,
    torch.bfloat16: DType.BFloat16,
    torch.float8_e4m3fn: DType.Float8E4M3,
    torch.float8_e5m2: DType.Float8E5M2,
}
_LAZY = {
    lazy.uint8: DType.Byte,
    lazy.int32: DType.Int32,
    lazy.int64: DType.Int64,
    lazy.float32: DType.Float32,
    lazy.float16: DType.Float16,
    lazy.bfloat16: DType.BFloat16,
    lazy.float8: DType.Float8E4M3,
    lazy.float8e5m2: DType.Float8E5M2,
}
_ALL: dict[Any, DType] = {**_TORCH, **_LAZY}
_BACK = {dtype: torch_dtype for torch_dtype, dtype in _TORCH.items()}


def nvte_dtype(dtype: Any) -> DType:
    """The element type of a framework's dtype. Raises ``DTypeError`` for one that has none here (int16, bool, ...)."""
    try:
        return _ALL[dtype]
    except (KeyError, TypeError):  # what cannot be looked up is none
        wanted = "fp64, fp32, fp16, bf16, an 8-bit float, uint8, int32 or int64"
        raise DTypeError(expected(wanted, of="a tensor", got=str(dtype), do="cast it")) from None


def torch_to_te_dtype(dtype: torch.dtype) -> DType:
    """``nvte_dtype`` of a torch dtype."""
    return nvte_dtype(dtype)


def te_to_torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of an element type. Raises ``DTypeError`` for E2M1, of which torch holds pairs alone."""
    if dtype not in _BACK:
        raise DTypeError(expected("an element type of whole bytes", of="te_to_torch_dtype", got=str(dtype), do="dequantize the tensor"))
    return _BACK[dtype]
