"""A size as a value that tensors can be computed with."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.lazy.dims import SizeLike
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir.ops import ConstantOp
from fusible.lazy.printing import Shape
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["DimensionValue"]


class DimensionValue(TraceOp):
    """The value of a size, a scalar. In a specialized program it is a constant."""

    expression: SizeLike
    dtype: dtype

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        return (), self.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        ConstantOp([], list(outputs), self.expression, self.dtype)  # type: ignore[arg-type] - see Shape
