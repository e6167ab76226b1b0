"""Evenly spaced values."""

from __future__ import annotations

import math

from fusible.errors import ArgumentError, expected
from fusible.lazy import dtypes
from fusible.lazy.dtypes import check_dtype
from fusible.lazy.frontend.convert import scalar
from fusible.lazy.frontend.tensor import Tensor
from fusible.lazy.trace.ops.cast import cast
from fusible.lazy.trace.ops.iota import iota

__all__ = ["arange"]


def arange(start: float, stop: float | None = None, step: float = 1, dtype: dtypes.dtype = dtypes.float32) -> Tensor:
    """``start, start + step, ...`` up to but without ``stop``; ``arange(stop)`` counts from 0. Narrow floats are computed in float32.

    Raises ``ArgumentError`` for a step of 0, and ``DTypeError`` for fractions in an integer dtype.
    """
    check_dtype(dtype)
    if stop is None:
        start, stop = 0, start
    if not step:
        raise ArgumentError(expected("a step other than 0", of="arange", got=step, do="pass a positive or a negative step"))
    count = max(0, math.ceil((stop - start) / step))
    wide = dtype if dtype.is_integer or dtype is dtypes.float64 else dtypes.float32
    steps = iota((count,), 0, wide)
    values = steps if step == 1 else steps * scalar(step, wide)
    return cast(values if not start else values + scalar(start, wide), dtype)
