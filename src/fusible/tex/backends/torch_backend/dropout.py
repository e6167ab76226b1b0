"""Dropout with a bit mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.kernels import TorchKernels
from fusible.tex.formulas.dropout import DropoutFormulas

__all__ = ["DropoutKernels"]


class DropoutKernels(TorchKernels, DropoutFormulas):
    def _draw_bits(self, x: Tensor, least: int) -> tuple[Tensor, Tensor]:
        keep = torch.empty(x.numel(), dtype=torch.uint8, device=x.device).random_(0, 256) >= least
        bits = keep.view(-1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=x.device)
        return keep.view(x.shape), bits.sum(-1, dtype=torch.uint8)

    def _kept_by(self, mask: Tensor, shape: Any) -> Tensor:
        return (mask.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=mask.device)).bitwise_and_(1).bool().view(shape)
