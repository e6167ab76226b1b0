"""Softmax of attention scores by the compiled kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.operands import plain
from fusible.tex.calls.softmax import SoftmaxBySteps

__all__ = ["SoftmaxKernels"]


class SoftmaxKernels(SoftmaxBySteps):
    def softmax_operand(self, x: Any) -> Tensor:
        return plain(x)

    def softmax_forward(self, x: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
        out = torch.empty_like(x)
        native.softmax_forward(x, out, scale, None if mask is None else mask.contiguous().view(torch.uint8), causal)
        return out

    def softmax_backward(self, g: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
        out = torch.empty_like(g)
        native.softmax_backward(g, y, out, scale, causal)
        return out
