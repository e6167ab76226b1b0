"""``full`` and what follows from it."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.lazy.dtypes import ALL, dtype, float32
from fusible.lazy.flat_ir.ops import BroadcastOp, ConstantOp, ReshapeOp, constant
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.arguments import as_shape
from fusible.lazy.frontend.interface import constrained
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace.op import Literal, TraceOp
from fusible.lazy.trace.tensor import TraceTensor

TensorLike = Any
"""As in ``fusible.lazy.frontend.convert``, which stands on this module."""

__all__ = ["Fill", "full", "full_like", "literal", "ones", "ones_like", "zeros", "zeros_like"]


@dataclass(eq=False)
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


@constrained(dtype="T1", returns="T1", T1=ALL)
def full(shape: Shape | int, value: TensorLike, dtype: dtype = float32) -> Tensor:
    """A tensor of ``shape`` whose every element is ``value``, a number, a size or a tensor of one element; a float8 saturates.

    A tensor is cast to ``dtype``. Of a number, raises ``DTypeError`` where ``dtype`` cannot hold that kind, and ``ArgumentError`` where it is out
    of range; ``ShapeError`` for a tensor of another number of elements.
    """
    if isinstance(value, Tensor):
        if any(n != 1 for n in value.trace_tensor.shape):
            raise ShapeError(expected("a number or a tensor of one element", of="value of full", got=value.trace_tensor, do="use expand for others"))
        return value.cast(dtype).reshape(()).broadcast_to(as_shape(shape))
    return record(Fill(literal(value, dtype), as_shape(shape), dtype))


@constrained(input="T1", dtype="T2", returns="T2", T1=ALL, T2=ALL)
def full_like(input: Tensor, value: TensorLike, dtype: dtype | None = None) -> Tensor:
    """``full`` with the shape of ``input``, and its dtype where none is given."""
    return full(input.shape, value, dtype or input.dtype)


@constrained(dtype="T1", returns="T1", T1=ALL)
def zeros(shape: Shape | int, dtype: dtype = float32) -> Tensor:
    """A tensor of zeros (False for bool)."""
    return full(shape, False if dtype.kind == "bool" else 0, dtype)


@constrained(dtype="T1", returns="T1", T1=ALL)
def ones(shape: Shape | int, dtype: dtype = float32) -> Tensor:
    """A tensor of ones (True for bool)."""
    return full(shape, True if dtype.kind == "bool" else 1, dtype)


@constrained(input="T1", dtype="T2", returns="T2", T1=ALL, T2=ALL)
def zeros_like(input: Tensor, dtype: dtype | None = None) -> Tensor:
    """``zeros`` with the shape of ``input``, and its dtype where none is given."""
    return zeros(input.shape, dtype or input.dtype)


@constrained(input="T1", dtype="T2", returns="T2", T1=ALL, T2=ALL)
def ones_like(input: Tensor, dtype: dtype | None = None) -> Tensor:
    """``ones`` with the shape of ``input``, and its dtype where none is given."""
    return ones(input.shape, dtype or input.dtype)
