"""Softmax of attention scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.operands import plain
from fusible.tex.calls.softmax import MASKED_SCORE, SoftmaxBySteps

__all__ = ["SoftmaxKernels"]


class SoftmaxKernels(SoftmaxBySteps):
    def softmax_operand(self, x: Any) -> Tensor:
        return plain(x)

    def softmax_forward(self, x: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
        if not x.numel():
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        scores = x.float() * scale
        zero = None
        if mask is not None:
            scores.masked_fill_(mask == 1, MASKED_SCORE)
            zero = scores.amax(-1, keepdim=True) == MASKED_SCORE
        elif causal:
            zero = _hidden(x)
            scores.masked_fill_(zero, -torch.inf)
        y = torch.softmax(scores, -1)
        return (y if zero is None else y.masked_fill_(zero, 0)).to(x.dtype)

    def softmax_backward(self, g: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
        wide, p = g.float(), y.float()
        if causal:
            wide = wide.masked_fill(_hidden(y), 0)
        return p.mul(wide - (p * wide).sum(-1, keepdim=True)).mul_(scale).to(g.dtype)


def _hidden(scores: Tensor) -> Tensor:
    """What the causal mask hides of ``[*, q, k]``, the last query seeing every key."""
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu_(keys - queries + 1)
