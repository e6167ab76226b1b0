"""From Python scalars to tensors."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from fusible.lazy import dtypes
from fusible.lazy.dtypes import dtype
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.trace.ops.fill import Fill, literal

__all__ = ["TensorLike", "as_tensor", "promote", "scalar"]

TensorLike = Any
"""A lazy tensor, or a Python number that adopts the dtype of the other operand."""


def is_scalar(value: object) -> bool:
    return isinstance(value, numbers.Real | np.bool_) and not isinstance(value, np.ndarray)


def scalar(value: Any, of: dtype) -> Tensor:
    """A 0-dimensional literal; raises ``DTypeError`` where ``of`` cannot hold the kind of number (a fraction in an integer)."""
    return record(Fill(literal(value, of), (), of))


def as_tensor(value: TensorLike, like: dtype | None = None) -> Tensor:
    """``value`` as a tensor: itself, a literal of dtype ``like``, or stored data."""
    if isinstance(value, Tensor):
        return value
    if is_scalar(value):
        default = dtypes.bool if isinstance(value, bool | np.bool_) else dtypes.int32 if isinstance(value, numbers.Integral) else dtypes.float32
        return scalar(value, like or default)
    return Tensor(value)


def promote(*values: TensorLike) -> list[Tensor]:
    """Operands as tensors, where Python numbers adopt the dtype of the first tensor among them."""
    like = next((v.dtype for v in values if isinstance(v, Tensor)), None)
    if like is None and not all(map(is_scalar, values)):
        like = next(t.dtype for t in map(as_tensor, values) if t is not None)
    if like is None:
        kinds = [as_tensor(v).dtype for v in values]
        like = next((k for k in (dtypes.float32, dtypes.int32) if k in kinds), dtypes.bool)
    return [as_tensor(v, like) for v in values]
