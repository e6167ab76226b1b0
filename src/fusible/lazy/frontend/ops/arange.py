"""Evenly spaced values."""

from __future__ import annotations

import math
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.lazy import dtypes
from fusible.lazy.dims import SizeLike, maximum, size_of
from fusible.lazy.dtypes import ALL
from fusible.lazy.frontend.convert import scalar
from fusible.lazy.frontend.interface import constrained
from fusible.lazy.frontend.tensor import Tensor
from fusible.lazy.trace.ops.cast import cast
from fusible.lazy.trace.ops.iota import iota

__all__ = ["arange"]


@constrained(dtype="T1", returns="T1", T1=ALL)
def arange(start: float | None = None, stop: Any = None, step: float = 1, dtype: dtypes.dtype = dtypes.float32) -> Tensor:
    """``start, start + step, ...`` up to but without ``stop``. Narrow floats are computed in float32; a float8 saturates.

    ``arange(stop)`` and ``arange(stop, dtype)`` count from 0. Raises ``ArgumentError`` for a step of 0 and without any end, and ``DTypeError`` for
    fractions in an integer dtype.
    """
    if isinstance(stop, dtypes.dtype):
        return arange(0, start, step, stop)
    if start is None or stop is None:
        start, stop = 0, start if stop is None else stop
    if stop is None:
        raise ArgumentError(expected("an end", of="arange", got="none", do="pass stop"))
    if not step:
        raise ArgumentError(expected("a step other than 0", of="arange", got=step, do="pass a positive or a negative step"))
    count = _count(start, stop, step)
    wide = dtypes.int32 if dtype in (dtypes.int4, dtypes.bool) else dtype if dtype.is_integer or dtype is dtypes.float64 else dtypes.float32
    steps = iota((count,), 0, wide)
    values = steps if step == 1 else steps * scalar(step, wide)
    return cast(values if start == 0 else values + start, dtype)


def _count(start: Any, stop: Any, step: Any) -> SizeLike:
    """How many values there are; a size where the ends are sizes."""
    first, last = size_of(start), size_of(stop)
    if first is None or last is None or not isinstance(step, int) or (isinstance(first, int) and isinstance(last, int)):
        return max(0, math.ceil((stop - start) / step))
    span = last - first if step > 0 else first - last
    return maximum(-(-span // abs(step)), 0)
