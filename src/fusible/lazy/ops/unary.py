"""Functions of one element."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from enum import member

from fusible.lazy import dtypes
from fusible.lazy.dtypes import ALL, FLOAT8S, FLOATS, INTEGERS, SIGNED, dtype
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, record
from fusible.lazy.ops.lowering import gaussian
from fusible.lazy.ops.lowering.convert import Body, compute_in, single, stored_as
from fusible.lazy.ops.lowering.expression import Expression, splat
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = [
    "UnaryElementwise",
    "abs",
    "bitwise_not",
    "cos",
    "erfc",
    "exp",
    "floor",
    "gelu",
    "is_finite",
    "log",
    "logical_not",
    "neg",
    "relu",
    "rsqrt",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sqrt",
    "tanh",
]


def _relu(inputs: list[FlatIRTensor], outputs: list[FlatIRTensor]) -> None:
    flat.MaxOp([*inputs, splat(0, inputs[0], "compare with zero")], outputs)


def _silu(inputs: list[FlatIRTensor], outputs: list[FlatIRTensor]) -> None:
    x = Expression(inputs[0], "compute x * sigmoid(x)")
    (x * x.apply(flat.LogisticOp)).bind(outputs[0])


def _erfc(inputs: list[FlatIRTensor], outputs: list[FlatIRTensor]) -> None:
    gaussian.erfc(Expression(inputs[0], "compute erfc(x)")).bind(outputs[0])


def _gelu(inputs: list[FlatIRTensor], outputs: list[FlatIRTensor]) -> None:
    """``x * (erfc(-x / sqrt(2)) / 2)``: for negative ``x``, ``1 + erf(x / sqrt(2))`` would cancel to 0."""
    x = Expression(inputs[0], "compute x * Phi(x)")
    (x * 0.5 * gaussian.erfc(x * -math.sqrt(0.5))).bind(outputs[0])


def _rounded(body: Body, inputs: list[FlatIRTensor], outputs: list[FlatIRTensor]) -> None:
    """``body``, and its result rounded to the nearest integer."""
    value = FlatIRTensor(outputs[0].shape, outputs[0].dtype, reason="round to the nearest integer")
    body(inputs, [value])
    flat.RoundNearestEvenOp([value], outputs)


class UnaryElementwise(TraceOp):
    """One function on every element."""

    class Kind(enum.Enum):
        """The functions. The value of one is what computes it: a FlatIR operation, or a function that builds several."""

        ABS = member(flat.AbsOp)
        COS = member(flat.CosineOp)
        ERFC = member(_erfc)
        EXP = member(flat.ExpOp)
        FLOOR = member(flat.FloorOp)
        GELU = member(_gelu)
        IS_FINITE = member(flat.IsFiniteOp)
        LOG = member(flat.LogOp)
        NEG = member(flat.NegateOp)
        NOT = member(flat.NotOp)
        RELU = member(_relu)
        RSQRT = member(flat.RsqrtOp)
        SIGMOID = member(flat.LogisticOp)
        SIGN = member(flat.SignOp)
        SILU = member(_silu)
        SIN = member(flat.SineOp)
        SQRT = member(flat.SqrtOp)
        TANH = member(flat.TanhOp)

    kind: Kind

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        (x,) = inputs
        return x.shape, dtypes.bool if self.kind is self.Kind.IS_FINITE else x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        of, body = inputs[0].dtype, self.kind.value
        if of.is_integer and self.kind in _ACTIVATIONS:
            compute_in(dtypes.float32, functools.partial(_rounded, body), inputs, outputs[0])
            return
        compute_in(single(of) if self.kind in _SEVERAL else stored_as(of), body, inputs, outputs[0])


_Kind = UnaryElementwise.Kind
_SIGNED = FLOATS | SIGNED
_SEVERAL = (_Kind.ERFC, _Kind.GELU, _Kind.SILU)
"""Functions that take several operations: 16-bit floats are computed in float32."""
_ACTIVATIONS = (_Kind.GELU, _Kind.SIGMOID, _Kind.SILU, _Kind.TANH)
"""Functions that take int8 too: it is computed in float32 and rounded to the nearest integer."""
_ACTIVATED = FLOATS | {dtypes.int8}


@constrained("abs", "__abs__", input="T1", returns="T1", T1=_SIGNED)
def abs(input: TensorLike) -> Tensor:
    """``|input|`` of floats and signed integers."""
    return record(UnaryElementwise(_Kind.ABS), input)


@constrained("cos", input="T1", returns="T1", T1=FLOATS)
def cos(input: TensorLike) -> Tensor:
    """``cos(input)``, in radians."""
    return record(UnaryElementwise(_Kind.COS), input)


@constrained("erfc", input="T1", returns="T1", T1=FLOATS)
def erfc(input: TensorLike) -> Tensor:
    """``1 - erf(input)``, which does not cancel for large ``input``. 16-bit floats are computed in float32 and rounded once."""
    return record(UnaryElementwise(_Kind.ERFC), input)


@constrained("exp", input="T1", returns="T1", T1=FLOATS)
def exp(input: TensorLike) -> Tensor:
    """``e ** input``."""
    return record(UnaryElementwise(_Kind.EXP), input)


@constrained("floor", input="T1", returns="T1", T1=FLOATS)
def floor(input: TensorLike) -> Tensor:
    """The largest integer not above ``input``, as a float."""
    return record(UnaryElementwise(_Kind.FLOOR), input)


@constrained("gelu", input="T1", returns="T1", T1=_ACTIVATED)
def gelu(input: TensorLike) -> Tensor:
    """``x * Phi(x) = x / 2 * (1 + erf(x / sqrt(2)))``, where Phi is the standard normal distribution function (arXiv:1606.08415).

    16-bit floats are computed in float32 and rounded once, int8 is computed in float32 and rounded to the nearest.
    """
    return record(UnaryElementwise(_Kind.GELU), input)


@constrained("is_finite", input="T1", returns="bool", T1=FLOATS)
def is_finite(input: TensorLike) -> Tensor:
    """Whether ``input`` is neither infinite nor NaN, as bool."""
    return record(UnaryElementwise(_Kind.IS_FINITE), input)


@constrained("log", input="T1", returns="T1", T1=FLOATS)
def log(input: TensorLike) -> Tensor:
    """The natural logarithm: NaN below 0, -inf at 0."""
    return record(UnaryElementwise(_Kind.LOG), input)


@constrained("neg", "__neg__", input="T1", returns="T1", T1=_SIGNED)
def neg(input: TensorLike) -> Tensor:
    """``-input`` of floats and signed integers."""
    return record(UnaryElementwise(_Kind.NEG), input)


@constrained("relu", input="T1", returns="T1", T1=ALL)
def relu(input: TensorLike) -> Tensor:
    """``max(input, 0)``; NaN stays NaN."""
    return record(UnaryElementwise(_Kind.RELU), input)


@constrained("rsqrt", input="T1", returns="T1", T1=FLOATS | FLOAT8S)
def rsqrt(input: TensorLike) -> Tensor:
    """``1 / sqrt(input)``."""
    return record(UnaryElementwise(_Kind.RSQRT), input)


@constrained("sigmoid", input="T1", returns="T1", T1=_ACTIVATED)
def sigmoid(input: TensorLike) -> Tensor:
    """``1 / (1 + exp(-input))``. int8 is computed in float32 and rounded to the nearest."""
    return record(UnaryElementwise(_Kind.SIGMOID), input)


@constrained("sign", input="T1", returns="T1", T1=_SIGNED)
def sign(input: TensorLike) -> Tensor:
    """-1, 0 or 1; NaN stays NaN."""
    return record(UnaryElementwise(_Kind.SIGN), input)


@constrained("silu", input="T1", returns="T1", T1=_ACTIVATED)
def silu(input: TensorLike) -> Tensor:
    """``x * sigmoid(x)``, also called swish. 16-bit floats are computed in float32 and rounded once, int8 is computed in float32 and rounded to
    the nearest."""
    return record(UnaryElementwise(_Kind.SILU), input)


@constrained("sin", input="T1", returns="T1", T1=FLOATS)
def sin(input: TensorLike) -> Tensor:
    """``sin(input)``, in radians."""
    return record(UnaryElementwise(_Kind.SIN), input)


@constrained("sqrt", input="T1", returns="T1", T1=FLOATS | FLOAT8S)
def sqrt(input: TensorLike) -> Tensor:
    """The square root: NaN below 0."""
    return record(UnaryElementwise(_Kind.SQRT), input)


@constrained("tanh", input="T1", returns="T1", T1=_ACTIVATED)
def tanh(input: TensorLike) -> Tensor:
    """The hyperbolic tangent. int8 is computed in float32 and rounded to the nearest."""
    return record(UnaryElementwise(_Kind.TANH), input)


@constrained("logical_not", input="T1", returns="T1", T1={dtypes.bool})
def logical_not(input: TensorLike) -> Tensor:
    """``not input`` of a bool tensor."""
    return record(UnaryElementwise(_Kind.NOT), input)


@constrained("bitwise_not", "__invert__", input="T1", returns="T1", T1=INTEGERS | {dtypes.bool})
def bitwise_not(input: TensorLike) -> Tensor:
    """Every bit inverted, of integers or bool."""
    return record(UnaryElementwise(_Kind.NOT), input)
