"""The arguments of functions that slide a window or pad: one entry per dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusible.errors import ArgumentError, expected
from fusible.lazy.assumptions import holds
from fusible.lazy.dims import SizeLike, size_of
from fusible.lazy.locate import pointing

__all__ = ["Padding", "padding_of", "steps"]

Padding = tuple[tuple[SizeLike, SizeLike], ...]
"""Elements before and after each dimension."""


def steps(value: Any, rank: int, parameter: str, what: str) -> tuple[SizeLike, ...]:
    """``value`` as one size of at least 1 per dimension; ``None`` means 1 everywhere. Raises ``ArgumentError`` for anything else."""
    if value is None:
        return (1,) * rank
    found = _sizes(value, 1, f"{parameter} of {what}")
    if len(found) == rank and None not in found:
        return found
    raise _wrong(f"{rank} ints of at least 1", parameter, what, value, "pass one for every dimension that it covers")


def padding_of(value: Any, rank: int, parameter: str, what: str) -> Padding:
    """``value`` as one pair of sizes of at least 0 per dimension; ``None`` means no padding. Raises ``ArgumentError`` for anything else."""
    if value is None:
        return ((0, 0),) * rank
    pairs = tuple(_sizes(pair, 0, f"{parameter} of {what}") for pair in _items(value))
    if len(pairs) == rank and all(len(p) == 2 and None not in p for p in pairs):
        return pairs
    raise _wrong(f"{rank} pairs of ints of at least 0", parameter, what, value, "pass (before, after) for every dimension that it covers")


def _items(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) else ()


def _sizes(value: Any, least: int, what: str) -> tuple[Any, ...]:
    """The sizes in ``value``, with ``None`` in place of each item that is no size, or that is below ``least``."""
    found = [size_of(n) for n in _items(value)]
    return tuple([n if n is not None and holds(n, ">=", least, what) else None for n in found])


def _wrong(wanted: str, parameter: str, what: str, got: object, do: str) -> ArgumentError:
    return pointing(ArgumentError(expected(wanted, of=f"{parameter} of {what}", got=repr(got), do=do)), parameter)
