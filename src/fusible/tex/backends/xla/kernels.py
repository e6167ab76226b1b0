"""How kernels on lazy tensors take operands and give results, as formulas ask for it."""

from __future__ import annotations

from fusible.tex.backends.xla.arrays import LAZY
from fusible.tex.backends.xla.operands import dense, plain, row_sum, write
from fusible.tex.backends.xla.quantizing import QUANTIZING, emit
from fusible.tex.formulas.arrays import ArrayKernels

__all__ = ["LazyKernels"]


class LazyKernels(ArrayKernels):
    _arrays, _quantizing = LAZY, QUANTIZING
    _plain, _dense, _write, _emit = staticmethod(plain), staticmethod(dense), staticmethod(write), staticmethod(emit)
    _row_sum = staticmethod(row_sum)
