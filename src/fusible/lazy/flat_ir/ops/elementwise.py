"""Operations on every element alone. Operands and output have one shape; broadcasting is explicit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.stablehlo.mlir import Mlir


class ElementwiseOp(FlatIROp):
    """The common part: ``HLO`` is the name of the builder in the StableHLO dialect."""

    HLO: ClassVar[str] = ""

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        return getattr(mlir.hlo, self.HLO)(*operands)

    def check(self) -> str | None:
        same = all(t.shape == self.outputs[0].shape for t in self.inputs)
        return None if same and len({t.dtype for t in self.inputs}) == 1 else "elementwise operands have one shape and one dtype"


class AbsOp(ElementwiseOp):
    HLO = "abs"


class AddOp(ElementwiseOp):
    HLO = "add"


class AndOp(ElementwiseOp):
    HLO = "and_"


class ClampOp(ElementwiseOp):
    """``clamp(low, x, high)``; NaN stays NaN."""

    HLO = "clamp"


class CosineOp(ElementwiseOp):
    HLO = "cosine"


class DivideOp(ElementwiseOp):
    HLO = "divide"


class ExpOp(ElementwiseOp):
    HLO = "exponential"


class FloorOp(ElementwiseOp):
    HLO = "floor"


class IsFiniteOp(ElementwiseOp):
    HLO = "is_finite"


class LogOp(ElementwiseOp):
    HLO = "log"


class LogisticOp(ElementwiseOp):
    HLO = "logistic"


class MaxOp(ElementwiseOp):
    HLO = "maximum"


class MinOp(ElementwiseOp):
    HLO = "minimum"


class MulOp(ElementwiseOp):
    HLO = "multiply"


class NegateOp(ElementwiseOp):
    HLO = "negate"


class NotOp(ElementwiseOp):
    HLO = "not_"


class OrOp(ElementwiseOp):
    HLO = "or_"


class PowOp(ElementwiseOp):
    HLO = "power"


class RemainderOp(ElementwiseOp):
    """The remainder of truncating division: it has the sign of the dividend."""

    HLO = "remainder"


class RoundNearestEvenOp(ElementwiseOp):
    HLO = "round_nearest_even"


class RsqrtOp(ElementwiseOp):
    HLO = "rsqrt"


class ShiftLeftOp(ElementwiseOp):
    HLO = "shift_left"


class ShiftRightLogicalOp(ElementwiseOp):
    HLO = "shift_right_logical"


class SignOp(ElementwiseOp):
    HLO = "sign"


class SineOp(ElementwiseOp):
    HLO = "sine"


class SqrtOp(ElementwiseOp):
    HLO = "sqrt"


class SubtractOp(ElementwiseOp):
    HLO = "subtract"


class TanhOp(ElementwiseOp):
    HLO = "tanh"


class XorOp(ElementwiseOp):
    HLO = "xor"


class CompareOp(ElementwiseOp):
    """``direction`` is EQ, NE, LT, LE, GT or GE; comparisons with NaN are false, except NE (stablehlo.compare)."""

    direction: str

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        direction = mlir.hlo.ComparisonDirectionAttr.get(self.direction)
        kind = {"float": "FLOAT", "float8": "FLOAT", "int": "SIGNED"}.get(self.inputs[0].dtype.kind, "UNSIGNED")
        return mlir.hlo.compare(operands[0], operands[1], direction, compare_type=mlir.hlo.ComparisonTypeAttr.get(kind))


class SelectOp(ElementwiseOp):
    """``select(predicate, on_true, on_false)``."""

    HLO = "select"

    def check(self) -> str | None:
        which, a, b = self.inputs
        ok = which.shape == a.shape == b.shape and a.dtype is b.dtype and which.dtype.kind == "bool"
        return None if ok else "a select has a bool predicate and two branches of one type"
