"""Choice by a predicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusible.errors import DTypeError, expected
from fusible.lazy import dtypes
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.convert import TensorLike, as_tensor, promote
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.broadcasting import broadcast_shapes, same_dtype
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Where", "where"]


@dataclass(eq=False)
class Where(TraceOp):
    """Elements of the second operand where the first is true, of the third where it is not."""

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        which, a, b = inputs
        if which.dtype is not dtypes.bool:
            raise DTypeError(expected("a bool tensor", of="the condition of where", got=which, do="compare it first"))
        same_dtype("where", a, b)
        return broadcast_shapes("where", which, a, b), a.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        shape = outputs[0].shape
        flat.SelectOp([flat.broadcast(t, shape, "expand an operand to the shape of the result") for t in inputs], list(outputs))


def where(condition: TensorLike, a: TensorLike, b: TensorLike) -> Tensor:
    """``a`` where ``condition`` (bool) is true, ``b`` elsewhere, with numpy's broadcasting; ``a`` and ``b`` have one dtype."""
    a, b = promote(a, b)
    return record(Where(), as_tensor(condition), a, b)
