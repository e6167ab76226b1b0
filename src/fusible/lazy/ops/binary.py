"""Functions of two elements, with numpy's broadcasting."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from fusible.lazy import dtypes
from fusible.lazy.dtypes import ALL, COMPUTED, INTEGERS, NUMBERS, dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.convert import TensorLike
from fusible.lazy.frontend.interface import constrained
from fusible.lazy.frontend.record import record
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor
from fusible.lazy.ops.lowering.convert import Body, compute_counted, compute_in, single, stored_as
from fusible.lazy.ops.lowering.division import divide, floor_divide, modulo
from fusible.lazy.printing import Shape
from fusible.lazy.trace.broadcasting import broadcast_shapes
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = [
    "BinaryElementwise",
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "div",
    "floor_div",
    "logical_and",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "mod",
    "mul",
    "pow",
    "shift_left",
    "shift_right_logical",
    "sub",
]


class BinaryElementwise(TraceOp):
    """One function on every pair of elements."""

    class Kind(enum.Enum):
        ADD = enum.auto()
        SUB = enum.auto()
        MUL = enum.auto()
        DIV = enum.auto()
        FLOOR_DIV = enum.auto()
        MOD = enum.auto()
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
        return broadcast_shapes(self.kind.name.lower(), a, b), a.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        shape = outputs[0].shape
        operands = [flat.broadcast(t, shape, "expand an operand to the shape of the result") for t in inputs]
        of = inputs[0].dtype
        if of.kind == "bool" and self.kind in _COUNTED:
            compute_counted(_TABLE[self.kind], operands, outputs[0])
            return
        wide = single(of) if self.kind in _SEVERAL else stored_as(of)
        compute_in(wide, _TABLE[self.kind], operands, outputs[0])


_Kind = BinaryElementwise.Kind
_BITS = INTEGERS | {dtypes.bool}
_SEVERAL = (_Kind.FLOOR_DIV, _Kind.MOD)
"""What takes several operations, so that 16-bit floats are computed in float32."""
_COUNTED = (_Kind.SUB, _Kind.DIV, _Kind.FLOOR_DIV, _Kind.MOD)
"""What takes bools as the numbers 0 and 1."""
_TABLE: dict[BinaryElementwise.Kind, Body] = {
    _Kind.ADD: flat.AddOp,
    _Kind.SUB: flat.SubtractOp,
    _Kind.MUL: flat.MulOp,
    _Kind.DIV: divide,
    _Kind.FLOOR_DIV: floor_divide,
    _Kind.MOD: modulo,
    _Kind.POW: flat.PowOp,
    _Kind.MAXIMUM: flat.MaxOp,
    _Kind.MINIMUM: flat.MinOp,
    _Kind.AND: flat.AndOp,
    _Kind.OR: flat.OrOp,
    _Kind.XOR: flat.XorOp,
    _Kind.SHIFT_LEFT: flat.ShiftLeftOp,
    _Kind.SHIFT_RIGHT_LOGICAL: flat.ShiftRightLogicalOp,
}


@TENSOR_METHOD_REGISTRY("add", "__add__")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=COMPUTED)
def add(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs + rhs``; integers wrap around."""
    return record(BinaryElementwise(_Kind.ADD), lhs, rhs)


@TENSOR_METHOD_REGISTRY("sub", "__sub__")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=COMPUTED)
def sub(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs - rhs``; integers wrap around. Bools count as 0 and 1, and the result is whether it is not 0."""
    return record(BinaryElementwise(_Kind.SUB), lhs, rhs)


@TENSOR_METHOD_REGISTRY("mul", "__mul__")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=COMPUTED)
def mul(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs * rhs``; integers wrap around."""
    return record(BinaryElementwise(_Kind.MUL), lhs, rhs)


@TENSOR_METHOD_REGISTRY("div", "__truediv__")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=COMPUTED)
def div(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs / rhs``. Integers give an integer: the quotient truncated toward zero, and 0 where ``rhs`` is 0.

    Bools count as 0 and 1, and the result is whether it is not 0.
    """
    return record(BinaryElementwise(_Kind.DIV), lhs, rhs)


@TENSOR_METHOD_REGISTRY("floor_div", "__floordiv__")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=ALL)
def floor_div(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs // rhs``: the quotient rounded toward minus infinity, by Python's rule also for floats: ``lhs - lhs % rhs`` divided by ``rhs``.

    Integers give 0 where ``rhs`` is 0. Bools count as 0 and 1, and the result is whether it is not 0.
    """
    return record(BinaryElementwise(_Kind.FLOOR_DIV), lhs, rhs)


@TENSOR_METHOD_REGISTRY("mod", "__mod__")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=COMPUTED)
def mod(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs % rhs``: the remainder with the sign of ``rhs``, as Python's and numpy's. Where ``rhs`` is 0, integers give 0 and floats NaN.

    Bools count as 0 and 1, and the result is whether it is not 0.
    """
    return record(BinaryElementwise(_Kind.MOD), lhs, rhs)


@TENSOR_METHOD_REGISTRY("pow", "__pow__")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=NUMBERS)
def pow(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs ** rhs``."""
    return record(BinaryElementwise(_Kind.POW), lhs, rhs)


@TENSOR_METHOD_REGISTRY("maximum")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=ALL)
def maximum(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """The larger of ``lhs`` and ``rhs``; NaN where either is NaN."""
    return record(BinaryElementwise(_Kind.MAXIMUM), lhs, rhs)


@TENSOR_METHOD_REGISTRY("minimum")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=ALL)
def minimum(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """The smaller of ``lhs`` and ``rhs``; NaN where either is NaN."""
    return record(BinaryElementwise(_Kind.MINIMUM), lhs, rhs)


@TENSOR_METHOD_REGISTRY("bitwise_and", "__and__")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=_BITS)
def bitwise_and(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """Bitwise and of integers or bools."""
    return record(BinaryElementwise(_Kind.AND), lhs, rhs)


@TENSOR_METHOD_REGISTRY("bitwise_or", "__or__")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=_BITS)
def bitwise_or(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """Bitwise or of integers or bools."""
    return record(BinaryElementwise(_Kind.OR), lhs, rhs)


@TENSOR_METHOD_REGISTRY("bitwise_xor", "__xor__")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=_BITS)
def bitwise_xor(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """Bitwise exclusive or of integers or bools."""
    return record(BinaryElementwise(_Kind.XOR), lhs, rhs)


@TENSOR_METHOD_REGISTRY("shift_left", "__lshift__")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=INTEGERS)
def shift_left(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs << rhs`` of integers; 0 where ``rhs`` is at least the width."""
    return record(BinaryElementwise(_Kind.SHIFT_LEFT), lhs, rhs)


@TENSOR_METHOD_REGISTRY("shift_right_logical")
@constrained(lhs="T1", rhs="T1", returns="T1", T1=INTEGERS)
def shift_right_logical(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs >> rhs`` of integers, filling with zeros whatever the sign; 0 where ``rhs`` is at least the width."""
    return record(BinaryElementwise(_Kind.SHIFT_RIGHT_LOGICAL), lhs, rhs)


@TENSOR_METHOD_REGISTRY("__radd__")
@constrained(rhs="T1", lhs="T1", returns="T1", T1=COMPUTED)
def _radd(rhs: TensorLike, lhs: TensorLike) -> Tensor:
    return record(BinaryElementwise(_Kind.ADD), lhs, rhs)


@TENSOR_METHOD_REGISTRY("__rsub__")
@constrained(rhs="T1", lhs="T1", returns="T1", T1=COMPUTED)
def _rsub(rhs: TensorLike, lhs: TensorLike) -> Tensor:
    return record(BinaryElementwise(_Kind.SUB), lhs, rhs)


@TENSOR_METHOD_REGISTRY("__rmul__")
@constrained(rhs="T1", lhs="T1", returns="T1", T1=COMPUTED)
def _rmul(rhs: TensorLike, lhs: TensorLike) -> Tensor:
    return record(BinaryElementwise(_Kind.MUL), lhs, rhs)


@TENSOR_METHOD_REGISTRY("__rtruediv__")
@constrained(rhs="T1", lhs="T1", returns="T1", T1=COMPUTED)
def _rdiv(rhs: TensorLike, lhs: TensorLike) -> Tensor:
    return record(BinaryElementwise(_Kind.DIV), lhs, rhs)


@TENSOR_METHOD_REGISTRY("__rfloordiv__")
@constrained(rhs="T1", lhs="T1", returns="T1", T1=ALL)
def _rfloor_div(rhs: TensorLike, lhs: TensorLike) -> Tensor:
    return record(BinaryElementwise(_Kind.FLOOR_DIV), lhs, rhs)


@TENSOR_METHOD_REGISTRY("__rmod__")
@constrained(rhs="T1", lhs="T1", returns="T1", T1=COMPUTED)
def _rmod(rhs: TensorLike, lhs: TensorLike) -> Tensor:
    return record(BinaryElementwise(_Kind.MOD), lhs, rhs)


@TENSOR_METHOD_REGISTRY("__rpow__")
@constrained(rhs="T1", lhs="T1", returns="T1", T1=NUMBERS)
def _rpow(rhs: TensorLike, lhs: TensorLike) -> Tensor:
    return record(BinaryElementwise(_Kind.POW), lhs, rhs)


@TENSOR_METHOD_REGISTRY("__rand__")
@constrained(rhs="T1", lhs="T1", returns="T1", T1=_BITS)
def _rbitwise_and(rhs: TensorLike, lhs: TensorLike) -> Tensor:
    return record(BinaryElementwise(_Kind.AND), lhs, rhs)


@TENSOR_METHOD_REGISTRY("__ror__")
@constrained(rhs="T1", lhs="T1", returns="T1", T1=_BITS)
def _rbitwise_or(rhs: TensorLike, lhs: TensorLike) -> Tensor:
    return record(BinaryElementwise(_Kind.OR), lhs, rhs)


@TENSOR_METHOD_REGISTRY("__rxor__")
@constrained(rhs="T1", lhs="T1", returns="T1", T1=_BITS)
def _rbitwise_xor(rhs: TensorLike, lhs: TensorLike) -> Tensor:
    return record(BinaryElementwise(_Kind.XOR), lhs, rhs)


@TENSOR_METHOD_REGISTRY("__rlshift__")
@constrained(rhs="T1", lhs="T1", returns="T1", T1=INTEGERS)
def _rshift_left(rhs: TensorLike, lhs: TensorLike) -> Tensor:
    return record(BinaryElementwise(_Kind.SHIFT_LEFT), lhs, rhs)


@TENSOR_METHOD_REGISTRY("logical_and")
@constrained(lhs="T1", rhs="T1", returns="T1", T1={dtypes.bool})
def logical_and(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs and rhs`` of bool tensors."""
    return record(BinaryElementwise(_Kind.AND), lhs, rhs)


@TENSOR_METHOD_REGISTRY("logical_or")
@constrained(lhs="T1", rhs="T1", returns="T1", T1={dtypes.bool})
def logical_or(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs or rhs`` of bool tensors."""
    return record(BinaryElementwise(_Kind.OR), lhs, rhs)


@TENSOR_METHOD_REGISTRY("logical_xor")
@constrained(lhs="T1", rhs="T1", returns="T1", T1={dtypes.bool})
def logical_xor(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs xor rhs`` of bool tensors."""
    return record(BinaryElementwise(_Kind.XOR), lhs, rhs)
