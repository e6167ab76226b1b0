"""The checks of movements and paddings: whatever has ``shape`` and ``dtype`` is a tensor here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected

__all__ = ["check_equal_lengths", "check_same_dtype", "check_segments", "check_wider"]


def check_equal_lengths(function: str, *lists: Sequence[Any]) -> None:
    """Raise ``ArgumentError`` unless all lists are equally long."""
    lengths = [len(each) for each in lists]
    if len(set(lengths)) > 1:
        raise ArgumentError(expected("lists of equal length", of=function, got=lengths, do="pass one of each per tensor"))


def check_same_dtype(x: Any, like: Any, of: str) -> None:
    """Raise ``DTypeError`` unless ``x`` has the dtype of ``like``."""
    if x.dtype != like.dtype:
        raise DTypeError(expected(like.dtype, of=of, got=x.dtype, do="pass a tensor of that dtype"))


def check_segments(short: Any, padded: Any, rows: Sequence[int], padded_rows: Sequence[int], function: str) -> None:
    """Raise ``ShapeError`` unless ``short`` and ``padded`` are matrices of the same segments, none of which padding shortens."""
    check_equal_lengths(function, rows, padded_rows)
    for x, counts in ((short, rows), (padded, padded_rows)):
        if len(x.shape) != 2 or x.shape[0] != sum(counts):
            of = f"a matrix of the segments {list(counts)} of {function}"
            raise ShapeError(expected(f"[{sum(counts)}, n]", of=of, got=list(x.shape), do="pass the rows of each segment"))
    if short.shape[1] != padded.shape[1]:
        widths = f"{short.shape[1]} and {padded.shape[1]}"
        raise ShapeError(expected("equal widths", of=f"both matrices of {function}", got=widths, do="pass matrices of one width"))
    if any(not 0 <= one <= other for one, other in zip(rows, padded_rows, strict=True)):
        got = f"{list(rows)} and {list(padded_rows)}"
        raise ShapeError(expected("segments that padding does not shorten", of=function, got=got, do="pass both lists in the same order"))


def check_wider(out: Any, x: Any, of: str) -> None:
    """Raise unless ``out`` is like ``x``, or wider in its last dimension."""
    shape = tuple(out.shape)
    if shape[:-1] != tuple(x.shape[:-1]) or not shape or shape[-1] < x.shape[-1]:
        wanted = f"{[*x.shape]} or wider"
        raise ShapeError(expected(wanted, of=of, got=list(shape), do="pass a tensor of that shape"))
    check_same_dtype(out, x, of)
