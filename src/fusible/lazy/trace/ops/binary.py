"""Functions of two elements, with numpy's broadcasting."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from fusible.errors import DTypeError, expected
from fusible.lazy import dtypes
from fusible.lazy.dtypes import FLOATS, INTEGERS, dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.convert import TensorLike, promote
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.broadcasting import broadcast_shapes, same_dtype
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = [
    "BinaryElementwise",
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "div",
    "logical_and",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "mul",
    "pow",
    "shift_left",
    "shift_right_logical",
    "sub",
]


@dataclass(eq=False)
class BinaryElementwise(TraceOp):
    """One function on every pair of elements."""

    class Kind(enum.Enum):
        ADD = enum.auto()
        SUB = enum.auto()
        MUL = enum.auto()
        DIV = enum.auto()
        POW = enum.auto()
        MAXIMUM = enum.auto()
        MINIMUM = enum.auto()
        AND = enum.auto()
        OR = enum.auto()
        XOR = enum.auto()
        SHIFT_LEFT = enum.auto()
        SHIFT_RIGHT_LOGICAL = enum.auto()

    kind: Kind

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        a, b = inputs
        allowed = _TABLE[self.kind][1]
        same_dtype(self.kind.name.lower(), a, b)
        if a.dtype not in allowed:
            names = ", ".join(name for name, of in dtypes.DTYPES.items() if of in allowed)
            raise DTypeError(expected(f"a dtype among {names}", of=f"the operands of {self.kind.name.lower()}", got=a, do="cast them first"))
        return broadcast_shapes(self.kind.name.lower(), a, b), a.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        shape = outputs[0].shape
        operands = [flat.broadcast(t, shape, "expand an operand to the shape of the result") for t in inputs]
        _TABLE[self.kind][0](operands, list(outputs))


_Kind = BinaryElementwise.Kind
_NUMBERS = FLOATS | INTEGERS
_ALL = _NUMBERS | {dtypes.bool}
_BITS = INTEGERS | {dtypes.bool}
_TABLE: dict[BinaryElementwise.Kind, tuple[type[FlatIROp], frozenset[dtype]]] = {
    _Kind.ADD: (flat.AddOp, _NUMBERS),
    _Kind.SUB: (flat.SubtractOp, _NUMBERS),
    _Kind.MUL: (flat.MulOp, _NUMBERS),
    _Kind.DIV: (flat.DivideOp, FLOATS),
    _Kind.POW: (flat.PowOp, _NUMBERS),
    _Kind.MAXIMUM: (flat.MaxOp, _ALL),
    _Kind.MINIMUM: (flat.MinOp, _ALL),
    _Kind.AND: (flat.AndOp, _BITS),
    _Kind.OR: (flat.OrOp, _BITS),
    _Kind.XOR: (flat.XorOp, _BITS),
    _Kind.SHIFT_LEFT: (flat.ShiftLeftOp, INTEGERS),
    _Kind.SHIFT_RIGHT_LOGICAL: (flat.ShiftRightLogicalOp, INTEGERS),
}


def _binary(kind: BinaryElementwise.Kind, a: TensorLike, b: TensorLike) -> Tensor:
    if type(a) is not Tensor or type(b) is not Tensor:
        a, b = promote(a, b)
    return record(BinaryElementwise(kind), a, b)


@TENSOR_METHOD_REGISTRY("add", "__add__")
def add(a: TensorLike, b: TensorLike) -> Tensor:
    """``a + b``; integers wrap around."""
    return _binary(_Kind.ADD, a, b)


@TENSOR_METHOD_REGISTRY("sub", "__sub__")
def sub(a: TensorLike, b: TensorLike) -> Tensor:
    """``a - b``; integers wrap around."""
    return _binary(_Kind.SUB, a, b)


@TENSOR_METHOD_REGISTRY("mul", "__mul__")
def mul(a: TensorLike, b: TensorLike) -> Tensor:
    """``a * b``; integers wrap around."""
    return _binary(_Kind.MUL, a, b)


@TENSOR_METHOD_REGISTRY("div", "__truediv__")
def div(a: TensorLike, b: TensorLike) -> Tensor:
    """``a / b`` of floats."""
    return _binary(_Kind.DIV, a, b)


@TENSOR_METHOD_REGISTRY("pow", "__pow__")
def pow(a: TensorLike, b: TensorLike) -> Tensor:
    """``a ** b``."""
    return _binary(_Kind.POW, a, b)


@TENSOR_METHOD_REGISTRY("maximum")
def maximum(a: TensorLike, b: TensorLike) -> Tensor:
    """The larger of ``a`` and ``b``; NaN where either is NaN."""
    return _binary(_Kind.MAXIMUM, a, b)


@TENSOR_METHOD_REGISTRY("minimum")
def minimum(a: TensorLike, b: TensorLike) -> Tensor:
    """The smaller of ``a`` and ``b``; NaN where either is NaN."""
    return _binary(_Kind.MINIMUM, a, b)


@TENSOR_METHOD_REGISTRY("bitwise_and", "__and__")
def bitwise_and(a: TensorLike, b: TensorLike) -> Tensor:
    """Bitwise and of integers or bools."""
    return _binary(_Kind.AND, a, b)


@TENSOR_METHOD_REGISTRY("bitwise_or", "__or__")
def bitwise_or(a: TensorLike, b: TensorLike) -> Tensor:
    """Bitwise or of integers or bools."""
    return _binary(_Kind.OR, a, b)


@TENSOR_METHOD_REGISTRY("bitwise_xor", "__xor__")
def bitwise_xor(a: TensorLike, b: TensorLike) -> Tensor:
    """Bitwise exclusive or of integers or bools."""
    return _binary(_Kind.XOR, a, b)


@TENSOR_METHOD_REGISTRY("shift_left", "__lshift__")
def shift_left(a: TensorLike, b: TensorLike) -> Tensor:
    """``a << b`` of integers; 0 where ``b`` is at least the width."""
    return _binary(_Kind.SHIFT_LEFT, a, b)


@TENSOR_METHOD_REGISTRY("shift_right_logical")
def shift_right_logical(a: TensorLike, b: TensorLike) -> Tensor:
    """``a >> b`` of integers, filling with zeros whatever the sign; 0 where ``b`` is at least the width."""
    return _binary(_Kind.SHIFT_RIGHT_LOGICAL, a, b)


@TENSOR_METHOD_REGISTRY("__radd__")
def _radd(b: TensorLike, a: TensorLike) -> Tensor:
    return _binary(_Kind.ADD, a, b)


@TENSOR_METHOD_REGISTRY("__rsub__")
def _rsub(b: TensorLike, a: TensorLike) -> Tensor:
    return _binary(_Kind.SUB, a, b)


@TENSOR_METHOD_REGISTRY("__rmul__")
def _rmul(b: TensorLike, a: TensorLike) -> Tensor:
    return _binary(_Kind.MUL, a, b)


@TENSOR_METHOD_REGISTRY("__rtruediv__")
def _rdiv(b: TensorLike, a: TensorLike) -> Tensor:
    return _binary(_Kind.DIV, a, b)


@TENSOR_METHOD_REGISTRY("__rpow__")
def _rpow(b: TensorLike, a: TensorLike) -> Tensor:
    return _binary(_Kind.POW, a, b)


@TENSOR_METHOD_REGISTRY("__rand__")
def _rbitwise_and(b: TensorLike, a: TensorLike) -> Tensor:
    return _binary(_Kind.AND, a, b)


@TENSOR_METHOD_REGISTRY("__ror__")
def _rbitwise_or(b: TensorLike, a: TensorLike) -> Tensor:
    return _binary(_Kind.OR, a, b)


@TENSOR_METHOD_REGISTRY("__rxor__")
def _rbitwise_xor(b: TensorLike, a: TensorLike) -> Tensor:
    return _binary(_Kind.XOR, a, b)


@TENSOR_METHOD_REGISTRY("__rlshift__")
def _rshift_left(b: TensorLike, a: TensorLike) -> Tensor:
    return _binary(_Kind.SHIFT_LEFT, a, b)


def _logical(kind: BinaryElementwise.Kind, a: TensorLike, b: TensorLike) -> Tensor:
    for t in (a, b):
        if isinstance(t, Tensor) and t.dtype is not dtypes.bool:
            name = f"logical_{kind.name.lower()}"
            raise DTypeError(
                expected(
                    "bool tensors", of=f"the operands of {name}", got=t.trace_tensor, do=f"compare them first, or use bitwise_{kind.name.lower()}"
                )
            )
    return _binary(kind, a, b)


@TENSOR_METHOD_REGISTRY("logical_and")
def logical_and(a: TensorLike, b: TensorLike) -> Tensor:
    """``a and b`` of bool tensors; raises ``DTypeError`` for others."""
    return _logical(_Kind.AND, a, b)


@TENSOR_METHOD_REGISTRY("logical_or")
def logical_or(a: TensorLike, b: TensorLike) -> Tensor:
    """``a or b`` of bool tensors; raises ``DTypeError`` for others."""
    return _logical(_Kind.OR, a, b)


@TENSOR_METHOD_REGISTRY("logical_xor")
def logical_xor(a: TensorLike, b: TensorLike) -> Tensor:
    """``a xor b`` of bool tensors; raises ``DTypeError`` for others."""
    return _logical(_Kind.XOR, a, b)
