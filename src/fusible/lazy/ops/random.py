"""Random tensors, and the state that seeds them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.lazy import dtypes
from fusible.lazy.dtypes import FLOATS
from fusible.lazy.frontend import Tensor, as_shape, constrained, located, record
from fusible.lazy.locate import pointing
from fusible.lazy.ops.cast import cast
from fusible.lazy.ops.random_words import RandomNormal, RandomUniform
from fusible.lazy.ops.reshape import reshape
from fusible.lazy.printing import Shape
from fusible.locks import Lock

__all__ = ["manual_seed", "rand", "randn"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class _State:
    """The seed of the process and how many tensors it has seeded."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.seed = self.calls = 0

    def next(self) -> int:
        """A seed that no other call has: that of call ``n`` is a bijection of ``seed + n * golden`` (the finalizer of SplitMix64)."""
        with self.lock:
            self.calls += 1
            z = (self.seed + self.calls * _GOLDEN) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)


_STATE = _State()


@located
def manual_seed(seed: int) -> None:
    """Begin a new sequence of random tensors: from here on the n-th call of ``rand`` or ``randn`` without a seed depends on ``seed`` and n alone.

    It counts when a call is recorded, not when its value is computed. The process begins as after ``manual_seed(0)``. Raises ``DTypeError``
    unless ``seed`` is an int.
    """
    value = _as_integer(seed)
    with _STATE.lock:
        _STATE.seed, _STATE.calls = value, 0


@constrained(dtype="T1", returns="T1", T1=FLOATS)
def rand(shape: Shape | int, low: float = 0.0, high: float = 1.0, dtype: dtypes.dtype = dtypes.float32, *, seed: Any = None) -> Tensor:
    """Random numbers, uniform in ``[low, high)``: multiples of the dtype's epsilon over two, scaled. 16-bit floats are computed in float32.

    ``seed`` is an int, or a lazy integer tensor of one element, so that a compiled function can draw anew at every call; without one the
    state of ``manual_seed`` gives the next, which a compiled function keeps. The same seed gives the same numbers. Raises ``ArgumentError``
    unless ``low <= high``, both finite.
    """
    if not -math.inf < low <= high < math.inf:
        raise ArgumentError(expected("finite ends, low <= high", of="the interval of rand", got=f"{low} to {high}", do="exchange or bound them"))
    return record(RandomUniform(as_shape(shape), dtype, float(low), float(high)), _seed(seed))


@constrained(dtype="T1", returns="T1", T1=FLOATS)
def randn(shape: Shape | int, mean: float = 0.0, std: float = 1.0, dtype: dtypes.dtype = dtypes.float32, *, seed: Any = None) -> Tensor:
    """Random numbers, normal with ``mean`` and standard deviation ``std``. 16-bit floats are computed in float32 and rounded once.

    ``seed`` as in ``rand``. Raises ``ArgumentError`` unless ``mean`` is finite and ``std`` is finite and at least 0.
    """
    if not (math.isfinite(mean) and 0 <= std < math.inf):
        got = f"mean {mean} and std {std}"
        raise ArgumentError(expected("a finite mean and a std of at least 0", of="the distribution of randn", got=got, do="pass std, not its log"))
    return record(RandomNormal(as_shape(shape), dtype, float(mean), float(std)), _seed(seed))


def _as_integer(seed: Any) -> int:
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise pointing(DTypeError(expected("an int", of="a seed", got=repr(seed), do="pass for instance 0")), "seed")
    return seed.__index__() & _MASK


def _seed(seed: Any) -> Tensor:
    """The seed as a scalar uint64 tensor: an input of the program, so that another seed needs no other program."""
    if not isinstance(seed, Tensor):
        return Tensor(np.uint64(_STATE.next() if seed is None else _as_integer(seed)))
    if not seed.dtype.is_integer or seed.size != 1:
        kind = DTypeError if not seed.dtype.is_integer else ShapeError
        raise pointing(kind(expected("one integer", of="a seed", got=seed.trace_tensor, do="pass an int64 tensor of shape ()")), "seed")
    return reshape(cast(seed, dtypes.uint64), ())
