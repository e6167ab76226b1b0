"""The quantized tensors of the formats: ``torch.Tensor``s over the fields of their storages, which they also are."""

from __future__ import annotations

import torch

from fusible.quantized.block_storage import Float8BlockwiseQTensorStorage, MXFP8TensorStorage, NVFP4TensorStorage
from fusible.quantized.parts import write_where
from fusible.quantized.saving import register_saved
from fusible.quantized.storage import Float8TensorStorage
from fusible.quantized.tensor import QuantizedTensor

__all__ = ["Float8BlockwiseQTensor", "Float8Tensor", "MXFP8Tensor", "NVFP4Tensor"]


class Float8Tensor(QuantizedTensor, Float8TensorStorage):
    """A tensor whose data is FP8 with one scale: ``Float8Tensor(shape, dtype, *, requires_grad=False, device=None, **fields)``.

    Its parts (``t[2:4]``, ``t[:, 8:]``, ``split``, ``select``, ``as_strided``) share its memory. What is written to one is quantized by the scale
    that the tensor has; a magnitude that has no room under it doubles the scale as often as it takes, which keeps the values of all other elements
    but the smallest.
    """

    def _write_where(self, values: torch.Tensor, changed: torch.Tensor) -> None:
        write_where(self, values, changed)


class Float8BlockwiseQTensor(QuantizedTensor, Float8BlockwiseQTensorStorage):
    """A tensor whose data is FP8 with fp32 scales of 1x128 blocks or 128x128 tiles; arguments like ``Float8Tensor``'s."""


class MXFP8Tensor(QuantizedTensor, MXFP8TensorStorage):
    """A tensor whose data is FP8 with a power of two per 32 elements; arguments like ``Float8Tensor``'s."""


class NVFP4Tensor(QuantizedTensor, NVFP4TensorStorage):
    """A tensor whose data is E2M1 with an E4M3 scale per 16 elements; arguments like ``Float8Tensor``'s."""


register_saved(Float8TensorStorage, Float8Tensor)
