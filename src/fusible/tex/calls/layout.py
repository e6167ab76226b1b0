"""The checks of movements and paddings: whatever has ``shape`` and ``dtype`` is a tensor here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.protocol import TensorLike, check_same_device

__all__ = ["check_disjoint", "check_each", "check_equal_lengths", "check_same_dtype", "check_segments", "check_wider"]


def check_disjoint(out: TensorLike, others: Sequence[Any], of: str) -> None:
    """Raise ``ArgumentError`` where ``out``, which a movement writes, shares memory with a tensor that it still reads, or writes too.

    Told by the first and the last byte of each, so that tensors which lie within one another without an element in common are refused as well. Lazy
    tensors have no memory, and those of the device ``meta`` neither.
    """
    if not isinstance(out, torch.Tensor) or out.is_meta:
        return
    first, last = _extent(out)
    for other in others:
        start, end = _extent(other)
        if first < end and start < last:
            raise ArgumentError(expected("memory of its own", of=of, got="that of another argument", do="pass a tensor of its own, or None"))


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor and of what follows the last."""
    if not x.numel():
        return 0, 0
    if x.is_contiguous():
        return x.data_ptr(), x.data_ptr() + x.nbytes
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + elements * x.element_size()


def check_equal_lengths(function: str, *lists: Sequence[Any]) -> None:
    """Raise ``ArgumentError`` unless all lists are equally long."""
    lengths = [len(each) for each in lists]
    if len(set(lengths)) > 1:
        raise ArgumentError(expected("lists of equal length", of=function, got=lengths, do="pass one of each per tensor"))


def check_each(values: Sequence[Any], belongs: Callable[[Any], bool], what: str, of: str) -> None:
    """Raise ``DTypeError`` unless each of ``values`` is ``what`` its list is made of, told by ``belongs(value)``."""
    for i, value in enumerate(values):
        if not belongs(value):
            raise DTypeError(expected(what, of=f"{of.replace(' of ', f'[{i}] of ', 1)}", got=repr(value), do="pass such ones alone"))


def check_same_dtype(x: TensorLike, like: TensorLike, of: str) -> None:
    """Raise ``DTypeError`` unless ``x`` has the dtype of ``like``."""
    if x.dtype != like.dtype:
        raise DTypeError(expected(like.dtype, of=of, got=x.dtype, do="pass a tensor of that dtype"))


def check_segments(short: TensorLike, padded: TensorLike, rows: Sequence[int], padded_rows: Sequence[int], function: str) -> None:
    """Raise ``ShapeError`` unless ``short`` and ``padded`` are matrices of the same segments, none of which padding shortens."""
    check_equal_lengths(function, rows, padded_rows)
    back = function == "fused_multi_row_unpadding"
    for name, x, counts in (("output" if back else "input", short, rows), ("input" if back else "output", padded, padded_rows)):
        if len(x.shape) != 2 or x.shape[0] != sum(counts):
            of = f"{name}, a matrix of the segments {list(counts)}, of {function}"
            raise ShapeError(expected(f"[{sum(counts)}, n]", of=of, got=list(x.shape), do="pass the rows of each segment"))
    if short.shape[1] != padded.shape[1]:
        widths = f"{short.shape[1]} and {padded.shape[1]}"
        raise ShapeError(expected("equal widths", of=f"input and output of {function}", got=widths, do="pass matrices of one width"))
    if any(not 0 <= one <= other for one, other in zip(rows, padded_rows, strict=True)):
        got = f"{list(rows)} and {list(padded_rows)}"
        of = f"input_row_list of {function}"
        raise ShapeError(expected("segments that padding does not shorten", of=of, got=got, do="pass both lists in the same order"))


def check_wider(out: TensorLike, x: TensorLike, of: str) -> None:
    """Raise unless ``out`` is like ``x``, where that is, or wider in its last dimension."""
    shape = tuple(out.shape)
    if shape[:-1] != tuple(x.shape[:-1]) or not shape or shape[-1] < x.shape[-1]:
        wanted = f"{[*x.shape]} or wider"
        raise ShapeError(expected(wanted, of=of, got=list(shape), do="pass a tensor of that shape"))
    check_same_dtype(out, x, of)
    check_same_device(out, x, of)
