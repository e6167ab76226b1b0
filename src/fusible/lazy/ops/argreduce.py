"""The indices of extreme elements."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from fusible.errors import ShapeError, expected
from fusible.lazy import dtypes
from fusible.lazy.assumptions import holds
from fusible.lazy.dtypes import NUMBERS, dtype
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, normalize_dim, record
from fusible.lazy.ops.lowering.expression import Expression, where
from fusible.lazy.ops.reshape import reshape
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["ArgReduce", "argmax", "argmin"]


class ArgReduce(TraceOp):
    """The first index of the extreme element along ``dim``; a NaN is the most extreme."""

    class Kind(enum.Enum):
        ARGMAX = "max"
        ARGMIN = "min"

    kind: Kind
    dim: int

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        name = self.kind.name.lower()
        if not holds(x.shape[self.dim], ">=", 1, f"the dimension of {name}"):
            raise ShapeError(expected("at least one element", of=f"the dimension of {name}", got=x, do="search another dimension"))
        return (*x.shape[: self.dim], *x.shape[self.dim + 1 :]), dtypes.int32

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        x, out = inputs[0], outputs[0]
        reason = "find the first of the extreme elements"
        bound = (x.dtype.min if x.dtype.is_integer else float("-inf"), x.dtype.max if x.dtype.is_integer else float("inf"))
        start = flat.constant(bound[self.kind is self.Kind.ARGMIN], x.dtype, reason)
        extreme = emit(flat.ReduceOp, [x, start], out.shape, x.dtype, reason, kind=self.kind.value, dims=[self.dim])
        others = [d for d in range(len(x.shape)) if d != self.dim]
        spread = emit(flat.BroadcastOp, [extreme], x.shape, x.dtype, reason, broadcast_dim=others)
        value = Expression(x, reason)
        hit = value == spread
        if x.dtype.is_floating:
            hit = hit | (value != value)
        index = Expression(emit(flat.IotaOp, [], x.shape, dtypes.int32, reason, dim=self.dim), reason)
        end = flat.constant(x.shape[self.dim], dtypes.int32, reason)
        found = where(hit, index, Expression(flat.broadcast(end, x.shape, reason), reason))
        flat.ReduceOp([found.tensor, end], [out], kind="min", dims=[self.dim])


def _search(kind: ArgReduce.Kind, input: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    flatten = dim is None
    found = 0 if flatten else normalize_dim(dim, input.ndim, kind.name.lower())
    index = record(ArgReduce(kind, found), reshape(input, (-1,)) if flatten else input)
    if not keepdim:
        return index
    return reshape(index, [1 if flatten or d == found else n for d, n in enumerate(input.shape)])


@constrained("argmax", input="T1", returns="int32", T1=NUMBERS)
def argmax(input: TensorLike, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The index of the first largest element along ``dim`` (of the flat tensor without one); the first NaN where there is one."""
    return _search(ArgReduce.Kind.ARGMAX, input, dim, keepdim)


@constrained("argmin", input="T1", returns="int32", T1=NUMBERS)
def argmin(input: TensorLike, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The index of the first smallest element along ``dim`` (of the flat tensor without one); the first NaN where there is one."""
    return _search(ArgReduce.Kind.ARGMIN, input, dim, keepdim)
