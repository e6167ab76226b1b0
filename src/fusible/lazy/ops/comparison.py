"""Comparisons."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import partial
from typing import Any

from fusible.lazy import dtypes
from fusible.lazy.dtypes import ALL, dtype
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import TENSOR_METHOD_REGISTRY, Tensor, TensorLike, constrained, record
from fusible.lazy.ops.lowering.convert import compute_in, stored_as
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor, broadcast_shapes

__all__ = ["Comparison", "eq", "ge", "gt", "le", "lt", "ne"]


class Comparison(TraceOp):
    """One comparison of every pair of elements, with numpy's broadcasting; false with NaN, except ``!=``."""

    class Kind(enum.Enum):
        EQ = enum.auto()
        NE = enum.auto()
        LT = enum.auto()
        LE = enum.auto()
        GT = enum.auto()
        GE = enum.auto()

    kind: Kind

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        a, b = inputs
        return broadcast_shapes("a comparison", a, b), dtypes.bool

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        shape = outputs[0].shape
        operands = [flat.broadcast(t, shape, "expand an operand to the shape of the result") for t in inputs]
        compute_in(stored_as(inputs[0].dtype), partial(flat.CompareOp, direction=self.kind.name), operands, outputs[0])


_Kind = Comparison.Kind


@TENSOR_METHOD_REGISTRY("__eq__")
def _eq_operator(lhs: Tensor, rhs: Any) -> Any:
    return NotImplemented if rhs is None or isinstance(rhs, str) else eq(lhs, rhs)


@constrained(lhs="T1", rhs="T1", returns="bool", T1=ALL)
def eq(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs == rhs`` of every pair of elements, as bool."""
    return record(Comparison(_Kind.EQ), lhs, rhs)


@TENSOR_METHOD_REGISTRY("__ne__")
def _ne_operator(lhs: Tensor, rhs: Any) -> Any:
    return NotImplemented if rhs is None or isinstance(rhs, str) else ne(lhs, rhs)


@constrained(lhs="T1", rhs="T1", returns="bool", T1=ALL)
def ne(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs != rhs`` of every pair of elements, as bool."""
    return record(Comparison(_Kind.NE), lhs, rhs)


@constrained("__lt__", lhs="T1", rhs="T1", returns="bool", T1=ALL)
def lt(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs < rhs`` of every pair of elements, as bool."""
    return record(Comparison(_Kind.LT), lhs, rhs)


@constrained("__le__", lhs="T1", rhs="T1", returns="bool", T1=ALL)
def le(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs <= rhs`` of every pair of elements, as bool."""
    return record(Comparison(_Kind.LE), lhs, rhs)


@constrained("__gt__", lhs="T1", rhs="T1", returns="bool", T1=ALL)
def gt(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs > rhs`` of every pair of elements, as bool."""
    return record(Comparison(_Kind.GT), lhs, rhs)


@constrained("__ge__", lhs="T1", rhs="T1", returns="bool", T1=ALL)
def ge(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs >= rhs`` of every pair of elements, as bool."""
    return record(Comparison(_Kind.GE), lhs, rhs)
