"""Softmax of attention scores, wide, rounded once."""

from __future__ import annotations

import math
from typing import Any

from fusible.tex.calls.softmax import MASKED_SCORE, SoftmaxBySteps
from fusible.tex.formulas.arrays import Array, ArrayKernels
from fusible.tex.interface.arguments import Tensor

__all__ = ["SoftmaxFormulas"]


class SoftmaxFormulas(ArrayKernels, SoftmaxBySteps):
    def _hidden_from(self, scores: Array) -> Any:
        """What the causal mask hides of ``[*, q, k]``, the last query seeing every key."""
        raise NotImplementedError

    def softmax_operand(self, x: Tensor) -> Any:
        return self._plain(x)

    def softmax_forward(self, x: Array, scale: float, mask: Array | None, causal: bool) -> Any:
        xp = self._arrays
        if 0 in x.shape:
            return xp.copy(x)
        scores, zero = xp.wide(x) * scale, None
        if mask is not None:
            scores = xp.fill(scores, mask == 1, MASKED_SCORE)
            zero = xp.largest(scores) == MASKED_SCORE
        elif causal:
            zero = self._hidden_from(x)
            scores = xp.fill(scores, zero, -math.inf)
        y = xp.softmax(scores)
        return xp.cast(y if zero is None else xp.fill(y, zero, 0.0), x.dtype)

    def softmax_backward(self, g: Array, y: Array, scale: float, causal: bool) -> Any:
        xp = self._arrays
        wide, p = xp.wide(g), xp.wide(y)
        if causal:
            wide = xp.filled(wide, self._hidden_from(y), 0.0)
        return xp.cast(xp.times(p * (wide - xp.total(p * wide)), scale), g.dtype)
