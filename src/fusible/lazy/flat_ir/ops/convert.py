"""Changes of element type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["BitcastConvertOp", "ConvertOp"]


class ConvertOp(FlatIROp):
    """Value conversion to the output's dtype, rounding to nearest even (stablehlo.convert)."""

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.convert(mlir.type(self.outputs[0]), operands[0])

    def check(self) -> str | None:
        return None if self.inputs[0].shape == self.outputs[0].shape else "a conversion keeps the shape"


class BitcastConvertOp(FlatIROp):
    """The same bits as another dtype of the same width (stablehlo.bitcast_convert)."""

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return mlir.hlo.bitcast_convert(mlir.type(self.outputs[0]), operands[0])

    def check(self) -> str | None:
        a, b = self.inputs[0], self.outputs[0]
        return None if a.shape == b.shape and a.dtype.itemsize == b.dtype.itemsize else "a bitcast keeps shape and width"
