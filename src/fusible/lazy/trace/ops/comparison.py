"""Comparisons."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusible.lazy import dtypes
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.convert import TensorLike, promote
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.broadcasting import broadcast_shapes, same_dtype
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Comparison", "equal", "greater", "greater_equal", "less", "less_equal", "not_equal"]


@dataclass(eq=False)
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
        same_dtype("a comparison", a, b)
        return broadcast_shapes("a comparison", a, b), dtypes.bool

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        shape = outputs[0].shape
        operands = [flat.broadcast(t, shape, "expand an operand to the shape of the result") for t in inputs]
        flat.CompareOp(operands, list(outputs), direction=self.kind.name)


_Kind = Comparison.Kind


def _compare(kind: Comparison.Kind, a: TensorLike, b: TensorLike) -> Tensor:
    if type(a) is not Tensor or type(b) is not Tensor:
        a, b = promote(a, b)
    return record(Comparison(kind), a, b)


@TENSOR_METHOD_REGISTRY("__eq__")
def _equal_operator(a: Tensor, b: Any) -> Any:
    return NotImplemented if b is None or isinstance(b, str) else _compare(_Kind.EQ, a, b)


def equal(a: TensorLike, b: TensorLike) -> Tensor:
    """``a == b`` of every pair of elements, as bool."""
    return _compare(_Kind.EQ, a, b)


@TENSOR_METHOD_REGISTRY("__ne__")
def _not_equal_operator(a: Tensor, b: Any) -> Any:
    return NotImplemented if b is None or isinstance(b, str) else _compare(_Kind.NE, a, b)


def not_equal(a: TensorLike, b: TensorLike) -> Tensor:
    """``a != b`` of every pair of elements, as bool."""
    return _compare(_Kind.NE, a, b)


@TENSOR_METHOD_REGISTRY("__lt__")
def less(a: TensorLike, b: TensorLike) -> Tensor:
    """``a < b`` of every pair of elements, as bool."""
    return _compare(_Kind.LT, a, b)


@TENSOR_METHOD_REGISTRY("__le__")
def less_equal(a: TensorLike, b: TensorLike) -> Tensor:
    """``a <= b`` of every pair of elements, as bool."""
    return _compare(_Kind.LE, a, b)


@TENSOR_METHOD_REGISTRY("__gt__")
def greater(a: TensorLike, b: TensorLike) -> Tensor:
    """``a > b`` of every pair of elements, as bool."""
    return _compare(_Kind.GT, a, b)


@TENSOR_METHOD_REGISTRY("__ge__")
def greater_equal(a: TensorLike, b: TensorLike) -> Tensor:
    """``a >= b`` of every pair of elements, as bool."""
    return _compare(_Kind.GE, a, b)
