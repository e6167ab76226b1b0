"""Quotients and remainders by the rules of numpy and Python, for floats and for integers.

Integers: what is divided by 0 gives 0, and the most negative number divided by -1 wraps around. The divisors that a processor traps on are
replaced before they are used, so no result depends on the engine.
"""

from __future__ import annotations

from collections.abc import Callable

from fusible.lazy import dtypes
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.op import FlatIROp, emit
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.ops.lowering.convert import splat

__all__ = ["divide", "floor_divide", "modulo"]


def _calculator(like: FlatIRTensor, reason: str) -> tuple[Callable[..., FlatIRTensor], Callable[..., FlatIRTensor]]:
    """Functions that emit an operation, and a comparison with zero or another tensor, in the type of ``like``."""

    def calculate(op: type[FlatIROp], *operands: FlatIRTensor) -> FlatIRTensor:
        return emit(op, operands, like.shape, operands[-1].dtype, reason)

    def compare(x: FlatIRTensor, direction: str, y: FlatIRTensor | None = None) -> FlatIRTensor:
        other = splat(0, x, reason) if y is None else y
        return emit(flat.CompareOp, [x, other], like.shape, dtypes.bool, reason, direction=direction)

    return calculate, compare


def divide(inputs: list[FlatIRTensor], outputs: list[FlatIRTensor]) -> None:
    """The quotient: of integers, truncated toward zero."""
    a, b = inputs
    if a.dtype.is_floating:
        flat.DivideOp(inputs, outputs)
        return
    by_zero, quotient, _ = _truncated(a, b)
    flat.SelectOp([by_zero, splat(0, a, "divide by zero"), quotient], outputs)


def floor_divide(inputs: list[FlatIRTensor], outputs: list[FlatIRTensor]) -> None:
    """The quotient rounded toward minus infinity."""
    a, b = inputs
    (_floor_floats if a.dtype.is_floating else _floor_integers)(a, b, outputs)


def modulo(inputs: list[FlatIRTensor], outputs: list[FlatIRTensor]) -> None:
    """The remainder of ``floor_divide``: it has the sign of the divisor."""
    a, b = inputs
    reason = "give a remainder the sign of the divisor"
    calculate, compare = _calculator(a, reason)
    if a.dtype.is_integer:
        by_zero, _, rest = _truncated(a, b)
        off = _off(rest, b) if a.dtype.kind == "int" else None
        rest = rest if off is None else calculate(flat.SelectOp, off, calculate(flat.AddOp, rest, b), rest)
        flat.SelectOp([by_zero, splat(0, a, "divide by zero"), rest], outputs)
        return
    rest = calculate(flat.RemainderOp, a, b)
    moved = calculate(flat.SelectOp, _off(rest, b), calculate(flat.AddOp, rest, b), rest)
    zero = calculate(flat.SelectOp, compare(b, "LT"), splat(-0.0, a, reason), splat(0.0, a, reason))
    flat.SelectOp([compare(rest, "EQ"), zero, moved], outputs)


def _off(rest: FlatIRTensor, b: FlatIRTensor) -> FlatIRTensor:
    """Where truncation rounded up: the remainder is not 0 and its sign is not the divisor's."""
    calculate, compare = _calculator(rest, "find where truncation rounds up")
    differ = calculate(flat.XorOp, compare(rest, "LT"), compare(b, "LT"))
    return calculate(flat.AndOp, differ, compare(rest, "NE"))


def _truncated(a: FlatIRTensor, b: FlatIRTensor) -> tuple[FlatIRTensor, FlatIRTensor, FlatIRTensor]:
    """Where ``b`` is 0; and the quotient and the remainder of integers elsewhere."""
    calculate, compare = _calculator(a, "keep a division from trapping")
    by_zero = compare(b, "EQ")
    safe = calculate(flat.SelectOp, by_zero, splat(1, b, "divide by one instead of zero"), b)
    if a.dtype.kind != "int":
        return by_zero, calculate(flat.DivideOp, a, safe), calculate(flat.RemainderOp, a, safe)
    minus = compare(b, "EQ", splat(-1, b, "find where a division negates"))
    safe = calculate(flat.SelectOp, minus, splat(1, b, "divide by one instead of minus one"), safe)
    quotient, rest = calculate(flat.DivideOp, a, safe), calculate(flat.RemainderOp, a, safe)
    return by_zero, calculate(flat.SelectOp, minus, calculate(flat.NegateOp, a), quotient), rest


def _floor_integers(a: FlatIRTensor, b: FlatIRTensor, outputs: list[FlatIRTensor]) -> None:
    reason = "round a quotient down"
    calculate, _ = _calculator(a, reason)
    by_zero, quotient, rest = _truncated(a, b)
    if a.dtype.kind == "int":
        quotient = calculate(flat.SelectOp, _off(rest, b), calculate(flat.SubtractOp, quotient, splat(1, a, reason)), quotient)
    flat.SelectOp([by_zero, splat(0, a, "divide by zero"), quotient], outputs)


def _floor_floats(a: FlatIRTensor, b: FlatIRTensor, outputs: list[FlatIRTensor]) -> None:
    """``a - a % b`` is a multiple of ``b``, so its quotient is an integer but for one rounding: the nearest integer is the answer.

    Flooring ``a / b`` itself would give 10 for ``1 // 0.1``, where 0.1 as a float goes 9 times into 1. Division by zero gives what ``/`` does.
    """
    reason = "round a quotient down"
    calculate, compare = _calculator(a, reason)
    rest = calculate(flat.RemainderOp, a, b)
    whole = calculate(flat.DivideOp, calculate(flat.SubtractOp, a, rest), b)
    whole = calculate(flat.SelectOp, _off(rest, b), calculate(flat.SubtractOp, whole, splat(1, a, reason)), whole)
    quotient = calculate(flat.DivideOp, a, b)
    nearest = calculate(flat.RoundNearestEvenOp, whole)
    signed = calculate(flat.MulOp, splat(0, a, reason), quotient)
    flat.SelectOp([compare(b, "EQ"), quotient, calculate(flat.SelectOp, compare(nearest, "EQ"), signed, nearest)], outputs)
