"""The arguments of functions that slide a window or pad: one entry per dimension."""

from __future__ import annotations

from typing import Any

from fusible.errors import ArgumentError, expected

__all__ = ["Padding", "padding_of", "steps"]

Padding = tuple[tuple[int, int], ...]
"""Elements before and after each dimension."""


def steps(given: Any, rank: int, parameter: str, what: str) -> tuple[int, ...]:
    """One int of at least 1 per dimension, 1 everywhere for ``None``; raises ``ArgumentError`` for anything else."""
    if given is None:
        return (1,) * rank
    found = _items(given)
    if len(found) == rank and all(_counts(n, 1) for n in found):
        return found
    raise _wrong(f"{rank} ints of at least 1", parameter, what, given, "pass one for every dimension that it covers")


def padding_of(given: Any, rank: int, parameter: str, what: str) -> Padding:
    """One pair of ints of at least 0 per dimension, none for ``None``; raises ``ArgumentError`` for anything else."""
    if given is None:
        return ((0, 0),) * rank
    pairs = tuple(_items(pair) for pair in _items(given))
    if len(pairs) == rank and all(len(p) == 2 and _counts(p[0], 0) and _counts(p[1], 0) for p in pairs):
        return pairs
    raise _wrong(f"{rank} pairs of ints of at least 0", parameter, what, given, "pass (before, after) for every dimension that it covers")


def _items(given: Any) -> tuple[Any, ...]:
    return () if isinstance(given, str) or not hasattr(given, "__len__") else tuple(given)


def _counts(n: Any, least: int) -> bool:
    return hasattr(n, "__index__") and not isinstance(n, bool) and n >= least


def _wrong(wanted: str, parameter: str, what: str, got: object, do: str) -> ArgumentError:
    error = ArgumentError(expected(wanted, of=f"{parameter} of {what}", got=repr(got), do=do))
    error.argument = parameter
    return error
