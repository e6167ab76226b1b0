"""From Python scalars to tensors."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.lazy import dtypes
from fusible.lazy.dims import bounds
from fusible.lazy.dtypes import dtype
from fusible.lazy.frontend.record import record
from fusible.lazy.frontend.tensor import DimensionSize, Tensor
from fusible.lazy.trace import DimensionValue, Fill, literal

__all__ = ["TensorLike", "as_tensor", "promote", "scalar"]

TensorLike = Any
"""A lazy tensor, or a Python number that adopts the dtype of the other operand."""

_PYTHON = {bool: dtypes.bool, int: dtypes.int32, float: dtypes.float32}
"""The dtypes of Python's own numbers. A lookup here saves the check against the classes of ``numbers``, which takes 1 us."""


def is_scalar(value: object) -> bool:
    return isinstance(value, numbers.Real | np.bool_) and not isinstance(value, np.ndarray)


def scalar(value: Any, of: dtype) -> Tensor:
    """A 0-dimensional literal; raises ``DTypeError`` where ``of`` cannot hold the kind of number (a fraction in an integer)."""
    return record(Fill(literal(value, of), (), of))


def as_value(size: DimensionSize, of: dtype) -> Tensor:
    """The size as a scalar tensor of dtype ``of``. Raises as ``literal`` does where ``of`` cannot hold it."""
    low, high = bounds(size.expression)
    if of.kind == "bool":
        raise DTypeError(expected("True or False", of="a literal of dtype bool", got=repr(size), do="compare or cast it first"))
    if of.is_integer and not of.min <= low <= high <= of.max:
        wanted = f"a size from {of.min} to {of.max}"
        raise ArgumentError(expected(wanted, of=f"a value of dtype {of}", got=f"{size} from {low} to {high}", do="use a wider dtype"))
    return record(DimensionValue(size.expression, of))


def as_tensor(value: TensorLike, like: dtype | None = None) -> Tensor:
    """``value`` as a tensor: itself, a literal or a size as dtype ``like``, or stored data."""
    of = _PYTHON.get(type(value))
    if of is not None:
        return scalar(value, like or of)
    if isinstance(value, DimensionSize):
        return as_value(value, like or dtypes.int32)
    if isinstance(value, Tensor):
        return value
    if is_scalar(value):
        default = dtypes.bool if isinstance(value, np.bool_) else dtypes.int32 if isinstance(value, numbers.Integral) else dtypes.float32
        return scalar(value, like or default)
    return Tensor(value)


def promote(*values: TensorLike) -> list[Tensor]:
    """Operands as tensors, where Python numbers and sizes adopt the dtype of the first tensor among them."""
    like = next((v.dtype for v in values if isinstance(v, Tensor) and not isinstance(v, DimensionSize)), None)
    if like is None and not all(is_scalar(v) or isinstance(v, DimensionSize) for v in values):
        like = next(as_tensor(v).dtype for v in values if not isinstance(v, DimensionSize))
    if like is None:
        kinds = [as_tensor(v).dtype for v in values]
        like = next((k for k in (dtypes.float32, dtypes.int32) if k in kinds), dtypes.bool)
    return [as_tensor(v, like) for v in values]
