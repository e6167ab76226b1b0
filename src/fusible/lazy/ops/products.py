"""Functions that repeat elements, or pair them."""

from __future__ import annotations

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.lazy.assumptions import holds
from fusible.lazy.dims import size_of
from fusible.lazy.dtypes import ALL, COMPUTED
from fusible.lazy.frontend import Tensor, TensorLike, constrained, normalize_dim
from fusible.lazy.locate import pointing
from fusible.lazy.ops.binary import mul
from fusible.lazy.ops.expand import broadcast_to
from fusible.lazy.ops.reshape import reshape
from fusible.lazy.ops.shaping import unsqueeze

__all__ = ["outer", "repeat"]


@constrained("outer", vec1="T1", vec2="T1", returns="T1", T1=COMPUTED)
def outer(vec1: TensorLike, vec2: TensorLike) -> Tensor:
    """``out[i, j] = vec1[i] * vec2[j]`` of two vectors. Raises ``ShapeError`` for other numbers of dimensions."""
    for name, vector in (("vec1", vec1), ("vec2", vec2)):
        if vector.ndim != 1:
            raise pointing(ShapeError(expected("one dimension", of=f"{name} of outer", got=vector.trace_tensor, do="flatten it")), name)
    return mul(unsqueeze(vec1, 1), vec2)


@constrained("repeat", input="T1", returns="T1", T1=ALL)
def repeat(input: TensorLike, repeats: int, dim: int) -> Tensor:
    """``input`` with every element repeated ``repeats`` times after itself along ``dim``, as numpy's ``repeat``.

    Raises ``ArgumentError`` for a negative number of times.
    """
    at = normalize_dim(dim, input.ndim, "repeat")
    count = size_of(repeats)
    if count is None or not holds(count, ">=", 0, "repeats of repeat"):
        error = expected("an int of at least 0", of="repeats of repeat", got=repr(repeats), do="pass how often every element stands")
        raise pointing(DTypeError(error) if count is None else ArgumentError(error), "repeats")
    before, size, after = input.shape[:at], input.shape[at], input.shape[at + 1 :]
    spread = broadcast_to(unsqueeze(input, at + 1), (*before, size, count, *after))
    return reshape(spread, (*before, size * count, *after))
