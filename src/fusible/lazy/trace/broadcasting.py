"""What operands of one operation must have in common."""

from __future__ import annotations

from fusible.errors import DTypeError, ShapeError, expected
from fusible.lazy.printing import Shape
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["broadcast_shapes", "same_dtype"]


def same_dtype(what: str, *tensors: TraceTensor) -> None:
    """Raise ``DTypeError`` unless all ``tensors`` have one dtype."""
    first = tensors[0].dtype
    for t in tensors:
        if t.dtype is not first:
            got = " and ".join(map(str, tensors))
            raise DTypeError(expected("one dtype", of=f"the operands of {what}", got=got, do="cast one of them"))


def broadcast_shapes(what: str, *tensors: TraceTensor) -> Shape:
    """The shape of the result by numpy's rules; raises ``ShapeError`` where sizes differ and neither is 1."""
    shape = tensors[0].shape
    for t in tensors[1:]:
        if t.shape != shape:
            joined = _broadcast(shape, t.shape)
            if joined is None:
                got = " and ".join(map(str, tensors))
                raise ShapeError(
                    expected(
                        "sizes that are equal or 1, counted from the last dimension", of=f"the operands of {what}", got=got, do="reshape one of them"
                    )
                )
            shape = joined
    return shape


def _broadcast(a: Shape, b: Shape) -> Shape | None:
    if len(a) < len(b):
        a, b = b, a
    lead = len(a) - len(b)
    out = list(a)
    for i, n in enumerate(b):
        if a[lead + i] == 1:
            out[lead + i] = n
        elif n not in (1, a[lead + i]):
            return None
    return tuple(out)
