"""Choice by a predicate."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.lazy import dtypes
from fusible.lazy.dtypes import ALL, dtype
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, record, scalar
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor, broadcast_shapes

__all__ = ["Where", "masked_fill", "where"]


class Where(TraceOp):
    """Elements of the second operand where the first is true, of the third where it is not."""

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        which, a, b = inputs
        return broadcast_shapes("where", which, a, b), a.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        shape = outputs[0].shape
        flat.SelectOp([flat.broadcast(t, shape, "expand an operand to the shape of the result") for t in inputs], list(outputs))


@constrained(condition="T2", input="T1", other="T1", returns="T1", T1=ALL, T2={dtypes.bool})
def where(condition: TensorLike, input: TensorLike, other: TensorLike) -> Tensor:
    """``input`` where ``condition`` is true, ``other`` elsewhere, with numpy's broadcasting."""
    return record(Where(), condition, input, other)


@constrained("masked_fill", input="T1", mask="T2", returns="T1", T1=ALL, T2={dtypes.bool})
def masked_fill(input: TensorLike, mask: TensorLike, value: float | bool) -> Tensor:
    """The number ``value`` where ``mask`` is true, ``input`` elsewhere, with numpy's broadcasting.

    Raises ``DTypeError`` where the dtype of ``input`` cannot hold that kind of number, and ``ArgumentError`` where it is out of range.
    """
    return record(Where(), mask, scalar(value, input.dtype), input)
