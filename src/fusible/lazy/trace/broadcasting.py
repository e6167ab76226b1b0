"""The shape to which the operands of an operation broadcast."""

from __future__ import annotations

from fusible.errors import ShapeError, expected
from fusible.lazy.assumptions import holds
from fusible.lazy.printing import Shape
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["broadcast_shapes"]


def broadcast_shapes(what: str, *tensors: TraceTensor) -> Shape:
    """The shape of the result by numpy's rules; raises ``ShapeError`` where sizes differ and neither is 1.

    A size that only a call determines is assumed not to be 1. Where it meets another size (a dynamic one, or a number other than 1), each call checks
    that both are equal.
    """
    shape = tensors[0].shape
    for t in tensors[1:]:
        if t.shape != shape:
            joined = _broadcast(shape, t.shape, what)
            if joined is None:
                got = " and ".join(map(str, tensors))
                wanted = "sizes that are equal or 1, counted from the last dimension"
                raise ShapeError(expected(wanted, of=f"the operands of {what}", got=got, do="reshape one of them"))
            shape = joined
    return shape


def _broadcast(a: Shape, b: Shape, what: str) -> Shape | None:
    if len(a) < len(b):
        a, b = b, a
    lead = len(a) - len(b)
    out = list(a)
    for i, n in enumerate(b):
        if a[lead + i] == 1:
            out[lead + i] = n
        elif n not in (1, a[lead + i]) and not holds(a[lead + i], "==", n, f"the operands of {what}"):
            return None
    return tuple(out)
