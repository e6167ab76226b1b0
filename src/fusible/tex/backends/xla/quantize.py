"""Quantize, dequantize, on lazy tensors: the formulas."""

from __future__ import annotations

from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.formulas.quantize import QuantizeFormulas

__all__ = ["QuantizeKernels"]


class QuantizeKernels(LazyKernels, QuantizeFormulas):
    pass
