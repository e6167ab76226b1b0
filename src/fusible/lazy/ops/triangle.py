"""The lower and the upper triangle of matrices."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.errors import ShapeError, expected
from fusible.lazy import dtypes
from fusible.lazy.dtypes import ALL, dtype
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, record
from fusible.lazy.locate import pointing
from fusible.lazy.ops.lowering.expression import Expression, splat
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Triangle", "tril", "triu"]


class Triangle(TraceOp):
    """The matrices of the last two dimensions, zero beyond the diagonal that lies ``diagonal`` columns right of the main one."""

    lower: bool
    diagonal: int

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        if len(x.shape) < 2:
            what = "tril" if self.lower else "triu"
            error = ShapeError(expected("at least two dimensions", of=f"the tensor of {what}", got=x, do="reshape it to matrices"))
            raise pointing(error, "tensor")
        return x.shape, x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        (x,) = inputs
        reason = "tell which elements a triangle keeps"
        plane = x.shape[-2:]
        row, column = (Expression(emit(flat.IotaOp, [], plane, dtypes.int32, reason, dim=d), reason) for d in (0, 1))
        if self.diagonal:
            row = row + self.diagonal
        kept = (row >= column if self.lower else row <= column).tensor
        zero = splat(False if x.dtype.kind == "bool" else 0, x, "hold the zeros of a triangle")
        flat.SelectOp([flat.broadcast(kept, x.shape, reason), x, zero], list(outputs))


@constrained("tril", tensor="T1", returns="T1", T1=ALL)
def tril(tensor: TensorLike, diagonal: int = 0) -> Tensor:
    """The matrices of the last two dimensions with zeros above a diagonal: elements ``[i, j]`` with ``j > i + diagonal`` are 0.

    Raises ``ShapeError`` for fewer than two dimensions.
    """
    return record(Triangle(True, int(diagonal)), tensor)


@constrained("triu", tensor="T1", returns="T1", T1=ALL)
def triu(tensor: TensorLike, diagonal: int = 0) -> Tensor:
    """The matrices of the last two dimensions with zeros below a diagonal: elements ``[i, j]`` with ``j < i + diagonal`` are 0.

    Raises ``ShapeError`` for fewer than two dimensions.
    """
    return record(Triangle(False, int(diagonal)), tensor)
