"""Counter-based random words, bit for bit those that ``tex.prim.dropout`` documents."""

from __future__ import annotations

from fusible import lazy
from fusible.errors import NotServedError, expected
from fusible.lazy import Tensor
from fusible.tex.calls.seeds import draw_seeds, supplied_seed

__all__ = ["next_seed", "uniform", "words"]


def words(seed: Tensor, counter: Tensor) -> Tensor:
    """The random word of each counter (uint64) under ``seed`` (int64 ``[1]``, or what broadcasts): uint64 values in [0, 2^32)."""
    return lazy.random_words(lazy.bitcast(seed, lazy.uint64), counter)


def next_seed(like: Tensor, function: str) -> Tensor:
    """The next seed, int64 ``[1]``. Raises ``NotServedError`` where ``like`` is of a program whose every run would have the same one."""
    seed = supplied_seed()
    if seed is not None:
        return seed
    if lazy.Trace([like]).tracers:
        got = "an argument of a function being compiled, whose every run would draw the same numbers"
        do = "compile it by an executor, which draws a seed for every run, or round to nearest"
        raise NotServedError(expected("a tensor with a value", of=f"{function} of lazy tensors", got=got, do=do))
    return Tensor(draw_seeds(1).numpy())


def uniform(seed: Tensor, fours: Tensor) -> Tensor:
    """fp32 numbers in (0, 1), ``[..., 4 n]``: of four elements for each of ``fours`` ``[..., n]`` (uint64), a fourth of the first one's number, under
    its seed. The torch backend draws the same."""
    words = lazy.random_words(lazy.bitcast(seed, lazy.uint64), fours, bits=64)
    shifts = lazy.reshape(lazy.iota((4,), 0, lazy.uint64) * 16, (1,) * words.ndim + (4,))
    quarters = lazy.shift_right_logical(lazy.reshape(words, (*words.shape, 1)), shifts) & 0xFFFF
    numbers = (lazy.cast(quarters, lazy.float32) + 0.5) * 2.0**-16
    return lazy.reshape(numbers, (*words.shape[:-1], 4 * words.shape[-1]))
