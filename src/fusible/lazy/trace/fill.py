"""A literal, alone or as every element of a tensor."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir.ops import BroadcastOp, ConstantOp, ReshapeOp, constant
from fusible.lazy.printing import Shape
from fusible.lazy.trace.op import Literal, TraceOp
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Fill", "literal"]


class Fill(TraceOp):
    """Every element is the literal ``value``."""

    has_literals: ClassVar[bool] = True

    value: float | int | bool
    shape: Shape
    dtype: dtype

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        return self.shape, self.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        if self.shape == ():
            ConstantOp([], list(outputs), self.value, self.dtype)
            return
        value = constant(self.value, self.dtype, "hold the value of a fill")
        BroadcastOp([value], list(outputs), broadcast_dim=[])

    def parts(self) -> tuple[tuple[object, ...], tuple[Literal, ...]]:
        return (self.shape, self.dtype), ((self.value, self.dtype),)

    def to_flat_ir_reading(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor], literals: Mapping[int, FlatIRTensor]) -> None:
        if self.shape == ():
            ReshapeOp([literals[0]], list(outputs))
            return
        BroadcastOp([literals[0]], list(outputs), broadcast_dim=[])


def literal(value: Any, of: dtype) -> float | int | bool:
    """``value`` as the Python number that a literal of dtype ``of`` holds; a float8 saturates.

    Raises ``DTypeError`` for a kind of number that ``of`` lacks (a fraction in an integer), ``ArgumentError`` for one out of range.
    """
    if of.kind == "float":
        return float(value)
    if of.kind == "float8":
        return float(np.clip(float(value), of.min, of.max))
    if of.kind == "bool":
        if isinstance(value, bool | np.bool_):
            return bool(value)
        raise DTypeError(expected("True or False", of="a literal of dtype bool", got=repr(value), do="compare or cast the tensor first"))
    if not isinstance(value, numbers.Integral | np.bool_):
        raise DTypeError(expected("an integer", of=f"a literal of dtype {of}", got=repr(value), do="cast the tensor to a floating dtype first"))
    if not of.min <= int(value) <= of.max:
        raise ArgumentError(expected(f"a number from {of.min} to {of.max}", of=f"a literal of dtype {of}", got=value, do="use a wider dtype"))
    return int(value)
