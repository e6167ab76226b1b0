"""Tensors as operations have them, as tensors of a plan, and as plain ones."""

from __future__ import annotations

from typing import Any

import torch

from fusible.nvte import QuantizedType, Tensor, Type, make_nvte_tensor
from fusible.quantized import QuantizedTensor, QuantizedTensorStorage

__all__ = ["maybe_dequantize", "wrapped"]


def wrapped(data: Any, type: Type | None) -> Tensor:
    """A tensor from code in torch as a tensor of a plan: a quantized one has ``type``, where that is quantized, else its own."""
    if isinstance(data, QuantizedTensor):
        data = data.storage_without_autograd()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(data, QuantizedTensorStorage):
        return Tensor(data, type) if isinstance(type, QuantizedType) else make_nvte_tensor(data)
    return make_nvte_tensor(data)


def maybe_dequantize(tensor: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A plain tensor of the values of ``tensor``, which may be quantized, in ``dtype`` (default: its own)."""
    if isinstance(tensor, (QuantizedTensor, QuantizedTensorStorage)):
        return tensor.dequantize(dtype=dtype)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    return tensor if dtype is None or tensor.dtype is dtype else tensor.to(dtype)
