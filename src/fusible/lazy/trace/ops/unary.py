"""Functions of one element."""

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
from fusible.lazy.frontend.convert import TensorLike, as_tensor
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = [
    "UnaryElementwise",
    "abs",
    "bitwise_not",
    "cos",
    "exp",
    "floor",
    "is_finite",
    "log",
    "logical_not",
    "neg",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sqrt",
    "tanh",
]


@dataclass(eq=False)
class UnaryElementwise(TraceOp):
    """One function on every element."""

    class Kind(enum.Enum):
        ABS = enum.auto()
        COS = enum.auto()
        EXP = enum.auto()
        FLOOR = enum.auto()
        IS_FINITE = enum.auto()
        LOG = enum.auto()
        NEG = enum.auto()
        NOT = enum.auto()
        RSQRT = enum.auto()
        SIGMOID = enum.auto()
        SIGN = enum.auto()
        SIN = enum.auto()
        SQRT = enum.auto()
        TANH = enum.auto()

    kind: Kind

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        allowed = _TABLE[self.kind][1]
        if x.dtype not in allowed:
            names = ", ".join(name for name, of in dtypes.DTYPES.items() if of in allowed)
            raise DTypeError(expected(f"a dtype among {names}", of=f"the operand of {self.kind.name.lower()}", got=x, do="cast it first"))
        return x.shape, dtypes.bool if self.kind is self.Kind.IS_FINITE else x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        _TABLE[self.kind][0](list(inputs), list(outputs))


_Kind = UnaryElementwise.Kind
_SIGNED = FLOATS | {dtypes.int8, dtypes.int32, dtypes.int64}
_TABLE: dict[UnaryElementwise.Kind, tuple[type[FlatIROp], frozenset[dtype]]] = {
    _Kind.ABS: (flat.AbsOp, _SIGNED),
    _Kind.COS: (flat.CosineOp, FLOATS),
    _Kind.EXP: (flat.ExpOp, FLOATS),
    _Kind.FLOOR: (flat.FloorOp, FLOATS),
    _Kind.IS_FINITE: (flat.IsFiniteOp, FLOATS),
    _Kind.LOG: (flat.LogOp, FLOATS),
    _Kind.NEG: (flat.NegateOp, _SIGNED),
    _Kind.NOT: (flat.NotOp, INTEGERS | {dtypes.bool}),
    _Kind.RSQRT: (flat.RsqrtOp, FLOATS),
    _Kind.SIGMOID: (flat.LogisticOp, FLOATS),
    _Kind.SIGN: (flat.SignOp, _SIGNED),
    _Kind.SIN: (flat.SineOp, FLOATS),
    _Kind.SQRT: (flat.SqrtOp, FLOATS),
    _Kind.TANH: (flat.TanhOp, FLOATS),
}


def _unary(kind: UnaryElementwise.Kind, x: TensorLike) -> Tensor:
    return record(UnaryElementwise(kind), as_tensor(x))


@TENSOR_METHOD_REGISTRY("abs", "__abs__")
def abs(x: TensorLike) -> Tensor:
    """``|x|`` of floats and signed integers."""
    return _unary(_Kind.ABS, x)


@TENSOR_METHOD_REGISTRY("cos")
def cos(x: TensorLike) -> Tensor:
    """``cos(x)``, in radians."""
    return _unary(_Kind.COS, x)


@TENSOR_METHOD_REGISTRY("exp")
def exp(x: TensorLike) -> Tensor:
    """``e ** x``."""
    return _unary(_Kind.EXP, x)


@TENSOR_METHOD_REGISTRY("floor")
def floor(x: TensorLike) -> Tensor:
    """The largest integer not above ``x``, as a float."""
    return _unary(_Kind.FLOOR, x)


@TENSOR_METHOD_REGISTRY("is_finite")
def is_finite(x: TensorLike) -> Tensor:
    """Whether ``x`` is neither infinite nor NaN, as bool."""
    return _unary(_Kind.IS_FINITE, x)


@TENSOR_METHOD_REGISTRY("log")
def log(x: TensorLike) -> Tensor:
    """The natural logarithm: NaN below 0, -inf at 0."""
    return _unary(_Kind.LOG, x)


@TENSOR_METHOD_REGISTRY("neg", "__neg__")
def neg(x: TensorLike) -> Tensor:
    """``-x`` of floats and signed integers."""
    return _unary(_Kind.NEG, x)


@TENSOR_METHOD_REGISTRY("rsqrt")
def rsqrt(x: TensorLike) -> Tensor:
    """``1 / sqrt(x)``."""
    return _unary(_Kind.RSQRT, x)


@TENSOR_METHOD_REGISTRY("sigmoid")
def sigmoid(x: TensorLike) -> Tensor:
    """``1 / (1 + exp(-x))``."""
    return _unary(_Kind.SIGMOID, x)


@TENSOR_METHOD_REGISTRY("sign")
def sign(x: TensorLike) -> Tensor:
    """-1, 0 or 1; NaN stays NaN."""
    return _unary(_Kind.SIGN, x)


@TENSOR_METHOD_REGISTRY("sin")
def sin(x: TensorLike) -> Tensor:
    """``sin(x)``, in radians."""
    return _unary(_Kind.SIN, x)


@TENSOR_METHOD_REGISTRY("sqrt")
def sqrt(x: TensorLike) -> Tensor:
    """The square root: NaN below 0."""
    return _unary(_Kind.SQRT, x)


@TENSOR_METHOD_REGISTRY("tanh")
def tanh(x: TensorLike) -> Tensor:
    """The hyperbolic tangent."""
    return _unary(_Kind.TANH, x)


@TENSOR_METHOD_REGISTRY("logical_not")
def logical_not(x: TensorLike) -> Tensor:
    """``not x`` of a bool tensor; raises ``DTypeError`` for another."""
    x = as_tensor(x)
    if x.dtype is not dtypes.bool:
        raise DTypeError(expected("a bool tensor", of="the operand of logical_not", got=x.trace_tensor, do="compare it first, or use bitwise_not"))
    return _unary(_Kind.NOT, x)


@TENSOR_METHOD_REGISTRY("bitwise_not", "__invert__")
def bitwise_not(x: TensorLike) -> Tensor:
    """Every bit inverted, of integers or bool."""
    return _unary(_Kind.NOT, x)
