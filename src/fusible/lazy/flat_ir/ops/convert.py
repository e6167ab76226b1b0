"""Changes of element type."""

from __future__ import annotations

from fusible.lazy.flat_ir.op import FlatIROp

__all__ = ["BitcastConvertOp", "ConvertOp"]


class ConvertOp(FlatIROp, hlo="convert", typed=True):
    """Value conversion to the output's dtype, rounding to nearest even."""

    def check(self) -> str | None:
        return None if self.inputs[0].shape == self.outputs[0].shape else "a conversion keeps the shape"


class BitcastConvertOp(FlatIROp, hlo="bitcast_convert", typed=True):
    """The same bits as another dtype of the same width."""

    def check(self) -> str | None:
        a, b = self.inputs[0], self.outputs[0]
        return None if a.shape == b.shape and a.dtype.itemsize == b.dtype.itemsize else "a bitcast keeps shape and width"
