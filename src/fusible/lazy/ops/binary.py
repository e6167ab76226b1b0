"""Functions of two elements, with numpy's broadcasting."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from enum import member

from fusible.lazy import dtypes
from fusible.lazy.dtypes import ALL, COMPUTED, INTEGERS, NUMBERS, dtype
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, record
from fusible.lazy.ops.lowering.convert import compute_counted, compute_in, single, stored_as
from fusible.lazy.ops.lowering.division import divide, floor_divide, modulo
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor, broadcast_shapes

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
        """The functions. The value of one is what computes it: a FlatIR operation, or a function that builds several."""

        ADD = member(flat.AddOp)
        SUB = member(flat.SubtractOp)
        MUL = member(flat.MulOp)
        DIV = member(divide)
        FLOOR_DIV = member(floor_divide)
        MOD = member(modulo)
        POW = member(flat.PowOp)
        MAXIMUM = member(flat.MaxOp)
        MINIMUM = member(flat.MinOp)
        AND = member(flat.AndOp)
        OR = member(flat.OrOp)
        XOR = member(flat.XorOp)
        SHIFT_LEFT = member(flat.ShiftLeftOp)
        SHIFT_RIGHT_LOGICAL = member(flat.ShiftRightLogicalOp)

    kind: Kind

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        a, b = inputs
        return broadcast_shapes(self.kind.name.lower(), a, b), a.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        shape = outputs[0].shape
        operands = [flat.broadcast(t, shape, "expand an operand to the shape of the result") for t in inputs]
        of = inputs[0].dtype
        if of.kind == "bool" and self.kind in _COUNTED:
            compute_counted(self.kind.value, operands, outputs[0])
            return
        wide = single(of) if self.kind in _SEVERAL else stored_as(of)
        compute_in(wide, self.kind.value, operands, outputs[0])


_Kind = BinaryElementwise.Kind
_BITS = INTEGERS | {dtypes.bool}
_SEVERAL = (_Kind.FLOOR_DIV, _Kind.MOD)
"""Functions that take several operations: 16-bit floats are computed in float32."""
_COUNTED = (_Kind.SUB, _Kind.DIV, _Kind.FLOOR_DIV, _Kind.MOD)
"""Functions that take bools as the numbers 0 and 1."""


@constrained("add", "__add__", lhs="T1", rhs="T1", returns="T1", T1=COMPUTED)
def add(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs + rhs``; integers wrap around."""
    return record(BinaryElementwise(_Kind.ADD), lhs, rhs)


@constrained("sub", "__sub__", lhs="T1", rhs="T1", returns="T1", T1=COMPUTED)
def sub(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs - rhs``; integers wrap around. Bools count as 0 and 1, and the result is whether it is not 0."""
    return record(BinaryElementwise(_Kind.SUB), lhs, rhs)


@constrained("mul", "__mul__", lhs="T1", rhs="T1", returns="T1", T1=COMPUTED)
def mul(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs * rhs``; integers wrap around."""
    return record(BinaryElementwise(_Kind.MUL), lhs, rhs)


@constrained("div", "__truediv__", lhs="T1", rhs="T1", returns="T1", T1=COMPUTED)
def div(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs / rhs``. Integers give an integer: the quotient truncated toward zero, and 0 where ``rhs`` is 0.

    Bools count as 0 and 1, and the result is whether it is not 0.
    """
    return record(BinaryElementwise(_Kind.DIV), lhs, rhs)


@constrained("floor_div", "__floordiv__", lhs="T1", rhs="T1", returns="T1", T1=ALL)
def floor_div(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs // rhs``: the quotient rounded toward minus infinity, by Python's rule also for floats: ``lhs - lhs % rhs`` divided by ``rhs``.

    Integers give 0 where ``rhs`` is 0. Bools count as 0 and 1, and the result is whether it is not 0.
    """
    return record(BinaryElementwise(_Kind.FLOOR_DIV), lhs, rhs)


@constrained("mod", "__mod__", lhs="T1", rhs="T1", returns="T1", T1=COMPUTED)
def mod(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs % rhs``: the remainder with the sign of ``rhs``, as Python's and numpy's. Where ``rhs`` is 0, integers give 0 and floats NaN.

    Bools count as 0 and 1, and the result is whether it is not 0.
    """
    return record(BinaryElementwise(_Kind.MOD), lhs, rhs)


@constrained("pow", "__pow__", lhs="T1", rhs="T1", returns="T1", T1=NUMBERS)
def pow(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs ** rhs``."""
    return record(BinaryElementwise(_Kind.POW), lhs, rhs)


@constrained("maximum", lhs="T1", rhs="T1", returns="T1", T1=ALL)
def maximum(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """The larger of ``lhs`` and ``rhs``; NaN where either is NaN."""
    return record(BinaryElementwise(_Kind.MAXIMUM), lhs, rhs)


@constrained("minimum", lhs="T1", rhs="T1", returns="T1", T1=ALL)
def minimum(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """The smaller of ``lhs`` and ``rhs``; NaN where either is NaN."""
    return record(BinaryElementwise(_Kind.MINIMUM), lhs, rhs)


@constrained("bitwise_and", "__and__", lhs="T1", rhs="T1", returns="T1", T1=_BITS)
def bitwise_and(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """Bitwise and of integers or bools."""
    return record(BinaryElementwise(_Kind.AND), lhs, rhs)


@constrained("bitwise_or", "__or__", lhs="T1", rhs="T1", returns="T1", T1=_BITS)
def bitwise_or(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """Bitwise or of integers or bools."""
    return record(BinaryElementwise(_Kind.OR), lhs, rhs)


@constrained("bitwise_xor", "__xor__", lhs="T1", rhs="T1", returns="T1", T1=_BITS)
def bitwise_xor(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """Bitwise exclusive or of integers or bools."""
    return record(BinaryElementwise(_Kind.XOR), lhs, rhs)


@constrained("shift_left", "__lshift__", lhs="T1", rhs="T1", returns="T1", T1=INTEGERS)
def shift_left(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs << rhs`` of integers; 0 where ``rhs`` is at least the width."""
    return record(BinaryElementwise(_Kind.SHIFT_LEFT), lhs, rhs)


@constrained("shift_right_logical", lhs="T1", rhs="T1", returns="T1", T1=INTEGERS)
def shift_right_logical(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs >> rhs`` of integers, filling with zeros whatever the sign; 0 where ``rhs`` is at least the width."""
    return record(BinaryElementwise(_Kind.SHIFT_RIGHT_LOGICAL), lhs, rhs)


@constrained("logical_and", lhs="T1", rhs="T1", returns="T1", T1={dtypes.bool})
def logical_and(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs and rhs`` of bool tensors."""
    return record(BinaryElementwise(_Kind.AND), lhs, rhs)


@constrained("logical_or", lhs="T1", rhs="T1", returns="T1", T1={dtypes.bool})
def logical_or(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs or rhs`` of bool tensors."""
    return record(BinaryElementwise(_Kind.OR), lhs, rhs)


@constrained("logical_xor", lhs="T1", rhs="T1", returns="T1", T1={dtypes.bool})
def logical_xor(lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """``lhs xor rhs`` of bool tensors."""
    return record(BinaryElementwise(_Kind.XOR), lhs, rhs)


def _reflect(name: str, operator: str, kind: BinaryElementwise.Kind, allowed: frozenset[dtype]) -> None:
    """Declare what Python calls where a tensor stands on the right: ``__rsub__`` for ``1 - x``."""

    def function(rhs: TensorLike, lhs: TensorLike) -> Tensor:
        return record(BinaryElementwise(kind), lhs, rhs)

    function.__name__ = function.__qualname__ = name
    constrained(operator, rhs="T1", lhs="T1", returns="T1", T1=allowed)(function)


_reflect("_radd", "__radd__", _Kind.ADD, COMPUTED)
_reflect("_rsub", "__rsub__", _Kind.SUB, COMPUTED)
_reflect("_rmul", "__rmul__", _Kind.MUL, COMPUTED)
_reflect("_rdiv", "__rtruediv__", _Kind.DIV, COMPUTED)
_reflect("_rfloor_div", "__rfloordiv__", _Kind.FLOOR_DIV, ALL)
_reflect("_rmod", "__rmod__", _Kind.MOD, COMPUTED)
_reflect("_rpow", "__rpow__", _Kind.POW, NUMBERS)
_reflect("_rbitwise_and", "__rand__", _Kind.AND, _BITS)
_reflect("_rbitwise_or", "__ror__", _Kind.OR, _BITS)
_reflect("_rbitwise_xor", "__rxor__", _Kind.XOR, _BITS)
_reflect("_rshift_left", "__rlshift__", _Kind.SHIFT_LEFT, INTEGERS)
