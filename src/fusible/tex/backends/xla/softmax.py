"""Softmax of attention scores on lazy tensors."""

from __future__ import annotations

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.formulas.softmax import SoftmaxFormulas

__all__ = ["SoftmaxKernels"]


class SoftmaxKernels(LazyKernels, SoftmaxFormulas):
    def _hidden_from(self, scores: Tensor) -> Tensor:
        shape = scores.shape[-2:]
        return lazy.iota(shape, 1, lazy.int32) > lazy.iota(shape, 0, lazy.int32) + (shape[1] - shape[0])
