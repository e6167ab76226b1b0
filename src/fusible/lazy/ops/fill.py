"""Tensors of one value: ``full``, and ``zeros`` and ``ones``, which call it."""

from __future__ import annotations

from fusible.errors import ShapeError, expected
from fusible.lazy.dtypes import ALL, dtype, float32
from fusible.lazy.frontend import Tensor, TensorLike, as_shape, constrained, record
from fusible.lazy.printing import Shape
from fusible.lazy.trace import Fill, literal

__all__ = ["full", "full_like", "ones", "ones_like", "zeros", "zeros_like"]


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
