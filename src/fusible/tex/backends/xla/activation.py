"""Activations on lazy tensors: the formulas."""

from __future__ import annotations

from fusible.tex.backends.xla.arrays import LAZY
from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.formulas.activation import ActivationFormulas
from fusible.tex.formulas.pointwise import Functions

__all__ = ["ActivationKernels", "POINTWISE"]

_functions = Functions(LAZY)
POINTWISE = _functions.pointwise


class ActivationKernels(LazyKernels, ActivationFormulas):
    _pointwise, _gates = POINTWISE, _functions.gates
