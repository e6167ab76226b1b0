"""Softmax of attention scores."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.kernels import TorchKernels
from fusible.tex.formulas.softmax import SoftmaxFormulas

__all__ = ["SoftmaxKernels"]


class SoftmaxKernels(TorchKernels, SoftmaxFormulas):
    def _hidden_from(self, scores: Tensor) -> Tensor:
        queries, keys = scores.shape[-2:]
        return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu_(keys - queries + 1)
