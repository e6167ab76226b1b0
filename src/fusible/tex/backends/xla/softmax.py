"""Softmax of attention scores on lazy tensors."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.operands import fp32, plain
from fusible.tex.calls.softmax import MASKED_SCORE, SoftmaxBySteps

__all__ = ["SoftmaxKernels"]


class SoftmaxKernels(SoftmaxBySteps):
    def softmax_operand(self, x: Any) -> Tensor:
        return plain(x)

    def softmax_forward(self, x: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
        if 0 in x.shape:
            return x
        scores = fp32(x) * scale
        zero = None
        if mask is not None:
            scores = lazy.where(mask == 1, MASKED_SCORE, scores)
            zero = lazy.max(scores, -1, keepdim=True) == MASKED_SCORE
        elif causal:
            zero = _hidden(x)
            scores = lazy.where(zero, -float("inf"), scores)
        y = lazy.softmax(scores, -1)
        return lazy.cast(y if zero is None else lazy.where(zero, 0.0, y), x.dtype)

    def softmax_backward(self, g: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
        wide, p = fp32(g), fp32(y)
        if causal:
            wide = lazy.where(_hidden(y), 0.0, wide)
        return lazy.cast(p * (wide - lazy.sum(p * wide, -1, keepdim=True)) * scale, g.dtype)


def _hidden(scores: Tensor) -> Tensor:
    """What the causal mask hides of ``[*, q, k]``, the last query seeing every key."""
    shape = scores.shape[-2:]
    return lazy.iota(shape, 1, lazy.int32) > lazy.iota(shape, 0, lazy.int32) + (shape[1] - shape[0])
