"""Evenly spaced values."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.lazy import dtypes
from fusible.lazy.dims import Size, SizeLike, maximum, size_of
from fusible.lazy.dtypes import ALL
from fusible.lazy.frontend import Tensor, constrained, scalar
from fusible.lazy.ops.cast import cast
from fusible.lazy.ops.iota import iota

__all__ = ["arange"]

_FINEST = 1 << 20
"""The largest denominator of a step to a dynamic size. Dividing floats, which counts to a known size, is exact for such where the result is whole."""


@constrained(dtype="T1", returns="T1", T1=ALL)
def arange(start: float | None = None, stop: Any = None, step: float = 1, dtype: dtypes.dtype = dtypes.float32) -> Tensor:
    """``start, start + step, ...`` up to but without ``stop``. Narrow floats are computed in float32; a float8 saturates.

    ``arange(stop)`` and ``arange(stop, dtype)`` count from 0. Raises ``ArgumentError`` for a step of 0 and without any end, and, where an end is a
    size that a call determines, for another end that is no whole number and a step that is no multiple of ``2**-20``; ``DTypeError`` for fractions
    in an integer dtype.
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
    first, last = _whole(start), _whole(stop)
    if not isinstance(first, Size) and not isinstance(last, Size):
        return max(0, math.ceil((stop - start) / step))
    ratio = Fraction(step) if isinstance(step, int | float) else Fraction(1, _FINEST + 1)
    if first is None or last is None or ratio.denominator > _FINEST:
        got = f"({start}, {stop}, {step})"
        wanted = f"whole numbers as ends beside a size, and a step that is a multiple of 1/{_FINEST}"
        raise ArgumentError(expected(wanted, of="arange up to a size that a call determines", got=got, do="count by 1 and multiply"))
    span = last - first if step > 0 else first - last
    return maximum(-(-span * ratio.denominator // abs(ratio.numerator)), 0)


def _whole(value: Any) -> SizeLike | None:
    """``value`` as a size, also where it is a float without a fraction; ``None`` for anything else."""
    return int(value) if isinstance(value, float) and value.is_integer() else size_of(value)
