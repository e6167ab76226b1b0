"""What FlatIR operations need of the MLIR bindings: dialects, types and attributes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.runtime import pjrt

__all__ = ["LOCK", "Mlir", "get"]

LOCK = threading.RLock()
"""Held while a module is built: one context serves all threads."""

_MLIR: list[Mlir] = []


class Mlir:
    """One MLIR context with the StableHLO dialect. ``ir``, ``hlo`` and ``func`` are the binding's modules."""

    def __init__(self) -> None:
        self.ir, self.hlo, self.func = pjrt.mlir_modules()
        self.context = pjrt.mlir_context()
        self._elements: dict[dtype, Any] = {}

    def element(self, of: dtype) -> Any:
        """The MLIR type of an element type."""
        if of not in self._elements:
            self._elements[of] = self.ir.Type.parse(of.mlir, self.context)
        return self._elements[of]

    def type(self, of: FlatIRTensor) -> Any:
        """The ranked tensor type of a value."""
        return self.ir.RankedTensorType.get(of.shape, self.element(of.dtype))

    def i64(self, value: int) -> Any:
        return self.ir.IntegerAttr.get(self.ir.IntegerType.get_signless(64), value)

    def ints(self, values: Sequence[int]) -> Any:
        return self.ir.DenseI64ArrayAttr.get(list(values))

    def pairs(self, values: Sequence[tuple[int, int]]) -> Any:
        """An ``[n, 2]`` integer attribute, as paddings are given."""
        return self.ir.DenseIntElementsAttr.get(np.array(values, np.int64).reshape(-1, 2))

    def splat(self, value: float | bool, of: dtype) -> Any:
        """The scalar literal ``value``, rounded to ``of``."""
        kind = self.ir.RankedTensorType.get((), self.element(of))
        if of.kind == "bool":
            return self.ir.DenseElementsAttr.get_splat(kind, self.ir.BoolAttr.get(bool(value)))
        with np.errstate(all="ignore"):
            bits = np.array(value).astype(of.numpy)
        if of.kind in ("float", "float8"):
            bits = bits.view(f"u{of.itemsize}")
        return self.ir.DenseElementsAttr.get(bits, type=kind)


def get() -> Mlir:
    """The process's context, made on first use."""
    with LOCK:
        if not _MLIR:
            _MLIR.append(Mlir())
        return _MLIR[0]
