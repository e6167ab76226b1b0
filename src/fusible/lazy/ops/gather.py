"""Elements by index."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.errors import ShapeError, expected
from fusible.lazy import dtypes
from fusible.lazy.assumptions import holds
from fusible.lazy.dims import SizeLike, minimum, product
from fusible.lazy.dtypes import ALL, dtype
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, normalize_dim, record
from fusible.lazy.ops.lowering.expression import Expression, where
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Gather", "INDICES", "gather"]

INDICES = frozenset({dtypes.int32, dtypes.int64, dtypes.uint32})
"""The dtypes that an index may have."""


class Gather(TraceOp):
    """Slices of the first operand along ``dim``, chosen by the second."""

    dim: int

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        x, index = inputs
        if not holds(x.shape[self.dim], ">=", minimum(product(index.shape), 1), "gather"):
            raise ShapeError(expected("a dimension with elements", of="gather", got=x, do="gather along another dimension"))
        return (*x.shape[: self.dim], *index.shape, *x.shape[self.dim + 1 :]), x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        x, index = inputs
        if not x.shape[self.dim]:
            zero = flat.constant(0, x.dtype, "fill a gather that reads nothing")
            flat.BroadcastOp([zero], list(outputs), broadcast_dim=[])
            return
        if index.dtype is not dtypes.uint32:
            index = _wrapped(index, x.shape[self.dim])
        flat.GatherOp([x, index], list(outputs), dim=self.dim)


def _wrapped(index: FlatIRTensor, size: SizeLike) -> FlatIRTensor:
    """Negative indices counted from the end."""
    i = Expression(index, "count a negative index from the end")
    return where(i < 0, i + size, i).tensor


@constrained("gather", input="T1", index="T2", returns="T1", T1=ALL, T2=INDICES)
def gather(input: TensorLike, dim: int, index: TensorLike) -> Tensor:
    """``input[..., index, ...]`` at dimension ``dim``, as numpy's ``take``: the shape of ``index`` replaces that dimension.

    A negative index counts from the end. An index out of bounds reads the nearest element; it is not an error, because values are not known when
    the operation is recorded.
    """
    return record(Gather(normalize_dim(dim, input.ndim, "gather")), input, index)
