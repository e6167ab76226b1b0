"""Operations on every element alone. Operands and output have one shape; broadcasting is explicit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.stablehlo.mlir import Mlir


class ElementwiseOp(FlatIROp):
    """The base, which checks the types."""

    def check(self) -> str | None:
        same = all(t.shape == self.outputs[0].shape for t in self.inputs)
        return None if same and len({t.dtype for t in self.inputs}) == 1 else "elementwise operands have one shape and one dtype"


class AbsOp(ElementwiseOp, hlo="abs"):
    """``|x|``."""


class AddOp(ElementwiseOp, hlo="add"):
    """``x + y``."""


class AndOp(ElementwiseOp, hlo="and_"):
    """``x & y``: bitwise, of integers or bools."""


class ClampOp(ElementwiseOp, hlo="clamp"):
    """``clamp(low, x, high)``; NaN stays NaN."""


class CosineOp(ElementwiseOp, hlo="cosine"):
    """``cos(x)``."""


class DivideOp(ElementwiseOp, hlo="divide"):
    """``x / y``; of integers truncated toward zero."""


class ExpOp(ElementwiseOp, hlo="exponential"):
    """``e ** x``."""


class FloorOp(ElementwiseOp, hlo="floor"):
    """The largest integer not above ``x``, as a float."""


class IsFiniteOp(ElementwiseOp, hlo="is_finite"):
    """Whether ``x`` is neither infinite nor NaN, as bool."""


class LogOp(ElementwiseOp, hlo="log"):
    """The natural logarithm."""


class LogisticOp(ElementwiseOp, hlo="logistic"):
    """``1 / (1 + e ** -x)``."""


class MaxOp(ElementwiseOp, hlo="maximum"):
    """``max(x, y)``; NaN where either is NaN."""


class MinOp(ElementwiseOp, hlo="minimum"):
    """``min(x, y)``; NaN where either is NaN."""


class MulOp(ElementwiseOp, hlo="multiply"):
    """``x * y``."""


class NegateOp(ElementwiseOp, hlo="negate"):
    """``-x``."""


class NotOp(ElementwiseOp, hlo="not_"):
    """``~x``: bitwise, of integers or bools."""


class OrOp(ElementwiseOp, hlo="or_"):
    """``x | y``: bitwise, of integers or bools."""


class PowOp(ElementwiseOp, hlo="power"):
    """``x ** y``."""


class RemainderOp(ElementwiseOp, hlo="remainder"):
    """The remainder of truncating division: it has the sign of the dividend."""


class RoundNearestEvenOp(ElementwiseOp, hlo="round_nearest_even"):
    """The nearest integer as a float, ties to even."""


class RsqrtOp(ElementwiseOp, hlo="rsqrt"):
    """``1 / sqrt(x)``."""


class ShiftLeftOp(ElementwiseOp, hlo="shift_left"):
    """``x << y``."""


class ShiftRightLogicalOp(ElementwiseOp, hlo="shift_right_logical"):
    """``x >> y``, filled with zeros whatever the sign."""


class SignOp(ElementwiseOp, hlo="sign"):
    """-1, 0 or 1; NaN stays NaN."""


class SineOp(ElementwiseOp, hlo="sine"):
    """``sin(x)``."""


class SqrtOp(ElementwiseOp, hlo="sqrt"):
    """The square root."""


class SubtractOp(ElementwiseOp, hlo="subtract"):
    """``x - y``."""


class TanhOp(ElementwiseOp, hlo="tanh"):
    """The hyperbolic tangent."""


class XorOp(ElementwiseOp, hlo="xor"):
    """``x ^ y``: bitwise, of integers or bools."""


class CompareOp(ElementwiseOp):
    """``direction`` is EQ, NE, LT, LE, GT or GE; comparisons with NaN are false, except NE (stablehlo.compare)."""

    direction: str

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        direction = mlir.hlo.ComparisonDirectionAttr.get(self.direction)
        kind = {"float": "FLOAT", "float8": "FLOAT", "int": "SIGNED"}.get(self.inputs[0].dtype.kind, "UNSIGNED")
        return mlir.hlo.compare(operands[0], operands[1], direction, compare_type=mlir.hlo.ComparisonTypeAttr.get(kind))


class SelectOp(ElementwiseOp, hlo="select"):
    """``select(predicate, on_true, on_false)``."""

    def check(self) -> str | None:
        which, a, b = self.inputs
        ok = which.shape == a.shape == b.shape and a.dtype is b.dtype and which.dtype.kind == "bool"
        return None if ok else "a select has a bool predicate and two branches of one type"


__all__ = sorted(name for name, value in globals().items() if isinstance(value, type) and issubclass(value, ElementwiseOp))
