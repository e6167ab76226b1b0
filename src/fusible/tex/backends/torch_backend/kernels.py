"""How the torch backend's kernels take operands and give results, as formulas ask for it."""

from __future__ import annotations

from fusible.tex.backends.torch_backend.arrays import TORCH
from fusible.tex.backends.torch_backend.operands import dense, plain, row_sum, write
from fusible.tex.backends.torch_backend.quantizing import QUANTIZING, emit
from fusible.tex.formulas.arrays import ArrayKernels

__all__ = ["TorchKernels"]


class TorchKernels(ArrayKernels):
    _arrays, _quantizing = TORCH, QUANTIZING
    _plain, _dense, _write, _emit = staticmethod(plain), staticmethod(dense), staticmethod(write), staticmethod(emit)
    _row_sum = staticmethod(row_sum)
