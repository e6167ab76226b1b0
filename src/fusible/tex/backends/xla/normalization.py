"""Layer and RMS normalization on lazy tensors: the formulas."""

from __future__ import annotations

from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.formulas.normalization import NormalizationFormulas

__all__ = ["NormalizationKernels"]


class NormalizationKernels(LazyKernels, NormalizationFormulas):
    pass
