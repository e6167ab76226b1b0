"""Quantizing torch tensors with one scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.arrays import TORCH
from fusible.tex.backends.torch_backend.block_formats import BLOCKS
from fusible.tex.backends.torch_backend.fp8 import encode
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.formulas.quantize import Quantizing
from fusible.tex.protocol import QuantizerLike, check_same_device

__all__ = ["QUANTIZING", "emit", "quantize_tensor"]


def _encoded(x: Tensor, scale: Tensor, dtype: Any) -> Tensor:
    scaled = x * scale if x.dtype is torch.float32 or not x.dim() else x.float().mul_(scale)
    return encode(scaled.float(), dtype).view(x.shape)  # a scale has a dimension, and x may have none


def _raise_amax(quantizer: QuantizerLike | None, former: Tensor, amax: Tensor, noop: Tensor | None) -> None:
    if not former.numel():  # of a quantizer that nobody asks for it
        return
    with writing(former):
        if noop is None:
            torch.maximum(former, amax if former.dim() else amax[0], out=former)
        else:
            former.copy_(torch.where(noop == 1, former, torch.maximum(former, amax)))


QUANTIZING = Quantizing(
    arrays=TORCH,
    blocks=BLOCKS,
    encode=_encoded,
    reciprocal=torch.reciprocal,
    raise_amax=_raise_amax,
    check_same_device=check_same_device,
)
quantize_tensor, emit = QUANTIZING.tensor, QUANTIZING.emit
