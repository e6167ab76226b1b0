"""Whether two tensors agree: functions that compute at once, and return a Python bool."""

from __future__ import annotations

from fusible.lazy.dtypes import ALL, FLOATS
from fusible.lazy.frontend import TensorLike, constrained
from fusible.lazy.ops.binary import logical_and, logical_or
from fusible.lazy.ops.comparison import eq, le
from fusible.lazy.ops.reduce import all
from fusible.lazy.ops.reductions import widened
from fusible.lazy.ops.unary import abs, is_finite

__all__ = ["allclose", "equal"]


@constrained("allclose", input="T1", other="T1", T1=FLOATS)
def allclose(input: TensorLike, other: TensorLike, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Whether ``|input - other| <= atol + rtol * |other|`` for every pair of elements, with numpy's broadcasting.

    Equal infinities agree, and NaN agrees with nothing. 16-bit floats are compared in float32. Computes both now.
    """
    a, b = widened(input), widened(other)
    near = le(abs(a - b), abs(b) * float(rtol) + float(atol))
    return bool(all(logical_or(eq(a, b), logical_and(near, is_finite(b)))))


@constrained("equal", input="T1", other="T1", T1=ALL)
def equal(input: TensorLike, other: TensorLike) -> bool:
    """Whether both have one shape and the same elements; a NaN is equal to nothing, 0 to -0. Computes both now."""
    return input.shape == other.shape and bool(all(eq(input, other)))
