"""Formulas of FlatIR tensors, written as formulas: ``x * 2 + y`` emits the operations that compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusible.lazy import dtypes
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import FlatIROp, FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat

__all__ = ["Expression", "Operand", "redirect", "splat", "where"]


def splat(value: float, like: FlatIRTensor, reason: str) -> FlatIRTensor:
    """The literal ``value`` in the dtype and shape of ``like``."""
    return flat.broadcast(flat.constant(value, like.dtype, reason), like.shape, reason)


def redirect(value: FlatIRTensor, out: FlatIRTensor) -> None:
    """Let the operation that was emitted for ``value`` make ``out``, of the same type, in its place: the last step of a lowering."""
    op = value.producer
    assert op is not None and op.outputs == [value] and (out.shape, out.dtype) == (value.shape, value.dtype)
    op.outputs, out.producer = [out], op


def _unary(op: type[FlatIROp]) -> Callable[[Expression], Expression]:
    return lambda self: self.apply(op)


def _binary(op: type[FlatIROp]) -> Callable[[Expression, Operand], Expression]:
    return lambda self, other: self.apply(op, other)


def _reflected(op: type[FlatIROp]) -> Callable[[Expression, float], Expression]:
    return lambda self, number: self.literal(number).apply(op, self)


def _compared(direction: str) -> Callable[[Expression, Operand], Expression]:
    return lambda self, other: self.compare(direction, other)


class Expression:
    """A tensor in a formula. Operators and methods emit elementwise operations, and every tensor that they introduce gives ``reason`` as its reason.

    The other operand of an operator may be a tensor of the same dtype, which is broadcast to the shape of this one, or a number, which becomes a
    literal. ``==`` and the like compare elements, and give an expression of bools.
    """

    __slots__ = ("reason", "tensor")

    def __init__(self, tensor: FlatIRTensor, reason: str) -> None:
        self.tensor = tensor
        self.reason = reason

    def because(self, reason: str) -> Expression:
        """The same tensor in a formula that gives another reason."""
        return Expression(self.tensor, reason)

    def literal(self, value: float, reason: str | None = None) -> Expression:
        """The number ``value`` in the dtype and shape of this tensor."""
        return Expression(splat(value, self.tensor, reason or self.reason), self.reason)

    def apply(self, op: type[FlatIROp], *others: Operand, of: dtype | None = None, **attributes: Any) -> Expression:
        """The result of ``op`` on this tensor and ``others``, of this one's shape, and of its dtype where ``of`` gives no other."""
        x = self.tensor
        return Expression(emit(op, [x, *map(self._operand, others)], x.shape, of or x.dtype, self.reason, **attributes), self.reason)

    def _operand(self, other: Operand) -> FlatIRTensor:
        if isinstance(other, Expression):
            other = other.tensor
        if isinstance(other, FlatIRTensor):
            return flat.broadcast(other, self.tensor.shape, self.reason)
        return splat(other, self.tensor, self.reason)

    def bind(self, out: FlatIRTensor) -> None:
        """``redirect`` the result of the formula."""
        redirect(self.tensor, out)

    def to(self, of: dtype) -> Expression:
        """The values as ``of``, by StableHLO's conversion alone; ``lower_cast`` defines all edges."""
        return self.apply(flat.ConvertOp, of=of)

    def clamp(self, low: float, high: float) -> Expression:
        return self.literal(low).apply(flat.ClampOp, self, high)

    __abs__ = _unary(flat.AbsOp)
    __neg__ = _unary(flat.NegateOp)
    cos = _unary(flat.CosineOp)
    exp = _unary(flat.ExpOp)
    floor = _unary(flat.FloorOp)
    log = _unary(flat.LogOp)
    round = _unary(flat.RoundNearestEvenOp)
    sqrt = _unary(flat.SqrtOp)

    __add__ = _binary(flat.AddOp)
    __sub__ = _binary(flat.SubtractOp)
    __mul__ = _binary(flat.MulOp)
    __truediv__ = _binary(flat.DivideOp)
    __and__ = _binary(flat.AndOp)
    __or__ = _binary(flat.OrOp)
    __xor__ = _binary(flat.XorOp)
    __lshift__ = _binary(flat.ShiftLeftOp)
    __rshift__ = _binary(flat.ShiftRightLogicalOp)
    maximum = _binary(flat.MaxOp)
    remainder = _binary(flat.RemainderOp)

    __rsub__ = _reflected(flat.SubtractOp)
    __rmul__ = _reflected(flat.MulOp)
    __rtruediv__ = _reflected(flat.DivideOp)

    def compare(self, direction: str, other: Operand) -> Expression:
        """``CompareOp`` of every element, an expression of bools."""
        return self.apply(flat.CompareOp, other, of=dtypes.bool, direction=direction)

    def __eq__(self, other: Operand) -> Expression:  # type: ignore[override] - of the elements
        return self.compare("EQ", other)

    def __ne__(self, other: Operand) -> Expression:  # type: ignore[override] - of the elements
        return self.compare("NE", other)

    __lt__ = _compared("LT")
    __le__ = _compared("LE")
    __ge__ = _compared("GE")


Operand = Expression | FlatIRTensor | float
"""The other operand of an operator: an expression, a tensor, or a number, which becomes a literal."""


def where(condition: Expression, a: Expression | float, b: Expression) -> Expression:
    """Elements of ``a`` where ``condition`` is true, of ``b`` elsewhere, with the reason of ``b``. A number ``a`` has the type of ``b``."""
    chosen = a if isinstance(a, Expression) else b.literal(a)
    return condition.because(b.reason).apply(flat.SelectOp, chosen, b, of=b.tensor.dtype)
