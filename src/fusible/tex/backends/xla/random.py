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


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """fp32 numbers in [0, 1): the upper 24 bits of the word of each counter (uint64) under its seed. The torch backend draws the same."""
    return lazy.cast(lazy.shift_right_logical(words(seed, counter), 8), lazy.float32) * 2.0**-24
