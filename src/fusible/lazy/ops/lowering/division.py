"""Quotients and remainders by the rules of numpy and Python, for floats and for integers.

An integer divided by 0 gives 0, and the most negative integer divided by -1 wraps around. Divisors on which a processor traps are replaced before
they are used, so that no result depends on the engine.
"""

from __future__ import annotations

from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.ops.lowering.expression import Expression, where

__all__ = ["divide", "floor_divide", "modulo"]


def divide(inputs: list[FlatIRTensor], outputs: list[FlatIRTensor]) -> None:
    """The quotient: of integers, truncated toward zero."""
    if inputs[0].dtype.is_floating:
        flat.DivideOp(inputs, outputs)
        return
    a, b = _operands(inputs, "divide by zero")
    by_zero, quotient, _ = _truncated(a, b)
    where(by_zero, a.literal(0), quotient).bind(outputs[0])


def floor_divide(inputs: list[FlatIRTensor], outputs: list[FlatIRTensor]) -> None:
    """The quotient rounded toward minus infinity."""
    a, b = _operands(inputs, "round a quotient down")
    if inputs[0].dtype.is_floating:
        _floored(a, b).bind(outputs[0])
        return
    by_zero, quotient, rest = _truncated(a, b)
    if inputs[0].dtype.kind == "int":
        quotient = where(_off(rest, b), quotient - 1, quotient)
    where(by_zero, a.literal(0, "divide by zero"), quotient).bind(outputs[0])


def modulo(inputs: list[FlatIRTensor], outputs: list[FlatIRTensor]) -> None:
    """The remainder of ``floor_divide``: it has the sign of the divisor."""
    a, b = _operands(inputs, "give a remainder the sign of the divisor")
    if inputs[0].dtype.is_integer:
        by_zero, _, rest = _truncated(a, b)
        if inputs[0].dtype.kind == "int":
            rest = where(_off(rest, b), rest + b, rest)
        where(by_zero, a.literal(0, "divide by zero"), rest).bind(outputs[0])
        return
    rest = a.remainder(b)
    moved = where(_off(rest, b), rest + b, rest)
    zero = where(b < 0, a.literal(-0.0), a.literal(0.0))
    where(rest == 0, zero, moved).bind(outputs[0])


def _operands(inputs: list[FlatIRTensor], reason: str) -> list[Expression]:
    return [Expression(t, reason) for t in inputs]


def _off(rest: Expression, b: Expression) -> Expression:
    """Whether truncation rounded up: the remainder is not 0 and its sign is not the divisor's."""
    rest, b = (x.because("find where truncation rounds up") for x in (rest, b))
    return ((rest < 0) ^ (b < 0)) & (rest != 0)


def _truncated(a: Expression, b: Expression) -> tuple[Expression, Expression, Expression]:
    """Whether ``b`` is 0; and the truncated quotient and the remainder of integers where it is not."""
    reason = a.reason
    a, b = (x.because("keep a division from trapping") for x in (a, b))
    by_zero = b == 0
    safe = where(by_zero, b.literal(1, "divide by one instead of zero"), b)
    if a.tensor.dtype.kind != "int":
        return by_zero, (a / safe).because(reason), a.remainder(safe).because(reason)
    minus = b == b.literal(-1, "find where a division negates")
    safe = where(minus, b.literal(1, "divide by one instead of minus one"), safe)
    return by_zero, where(minus, -a, a / safe).because(reason), a.remainder(safe).because(reason)


def _floored(a: Expression, b: Expression) -> Expression:
    """``a - a % b`` of floats is a multiple of ``b``, so its quotient is an integer but for one rounding: the nearest integer is the answer.

    Flooring ``a / b`` itself would give 10 for ``1 // 0.1``, where 0.1 as a float goes 9 times into 1. Division by zero gives what ``/`` does.
    """
    rest = a.remainder(b)
    whole = (a - rest) / b
    nearest = where(_off(rest, b), whole - 1, whole).round()
    quotient = a / b
    return where(b == 0, quotient, where(nearest == 0, 0 * quotient, nearest))
