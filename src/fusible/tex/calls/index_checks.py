"""The checks of indices that come as data. They read tensors of the host alone, which costs about a microsecond per hundred numbers: on a device a
check would wait for it. There the caller answers for them, as with NVIDIA's kernels, and the kernels of this package clamp what they read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected

__all__ = [
    "check_counts_fit",
    "check_cumulative",
    "check_indices",
    "check_lengths",
    "check_once",
    "check_positions",
    "check_range",
    "check_sequences",
]


def _readable(x: torch.Tensor, of: str) -> bool:
    if x.is_floating_point() or x.is_complex():
        raise DTypeError(expected("int32", of=of, got=x.dtype, do="pass whole numbers"))
    return x.is_cpu


def check_cumulative(ends: torch.Tensor, limit: int, of: str) -> None:
    """Raise ``ArgumentError`` unless ``0 <= ends[0] <= ends[1] <= .. <= limit``, ``ShapeError`` for a tensor of another rank or without elements."""
    if ends.ndim != 1 or not ends.shape[0]:
        raise ShapeError(expected("[b + 1]", of=of, got=list(ends.shape), do="pass cumulative lengths from 0 on"))
    if not _readable(ends, of):
        return
    numbers = ends.tolist()
    if numbers[0] < 0 or any(after < before for before, after in itertools.pairwise(numbers)):
        raise ArgumentError(expected("cumulative lengths from 0 on", of=of, got=numbers, do="pass ones that never decrease"))
    if numbers[-1] > limit:
        raise ArgumentError(expected(f"at most {limit} tokens", of=of, got=numbers[-1], do="pass the lengths of the tensors"))


def check_lengths(cumulative: torch.Tensor, of: str, longest: int | None = None) -> None:
    """Raise ``ArgumentError`` unless ``cumulative`` never decreases from 0 or above, by ``longest`` at most (None: by any number)."""
    if not _readable(cumulative, of):
        return
    ends = cumulative.flatten().tolist()
    lengths = [after - before for before, after in itertools.pairwise(ends)]
    if ends and (ends[0] < 0 or min(lengths, default=0) < 0):
        raise ArgumentError(expected("cumulative lengths from 0 on", of=of, got=ends, do="pass ones that never decrease"))
    if longest is not None and max(lengths, default=0) > longest:
        raise ShapeError(expected(f"sequences of at most {longest} tokens", of=of, got=max(lengths), do="pass the lengths of the tensors"))


def check_range(x: torch.Tensor, lower: int, upper: int | None, of: str) -> None:
    """Raise ``ArgumentError`` unless ``lower <= x < upper`` (None: whatever the type holds) for every element of ``x``."""
    if not (_readable(x, of) and x.numel()):
        return
    least, most = (int(bound) for bound in x.aminmax())
    if least < lower or (upper is not None and most >= upper):
        wanted = f"integers from {lower}" + (f" to {upper - 1}" if upper is not None else " on")
        raise ArgumentError(expected(wanted, of=of, got=least if least < lower else most, do="pass indices of what there is"))


def check_sequences(starts: torch.Tensor, lengths: torch.Tensor, limit: int, of: str) -> None:
    """Raise ``ArgumentError`` unless every sequence lies within ``limit`` tokens, and no two share one."""
    if not (_readable(starts, of) and _readable(lengths, of)):
        return
    end = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if length < 0 or start < end or start + length > limit:
            got, wanted = f"tokens {start} to {start + length} after {end}", f"sequences one after another in {limit} tokens"
            raise ArgumentError(expected(wanted, of=of, got=got, do="check the cumulative lengths"))
        end = start + length


def check_positions(positions: Sequence[int], count: int, of: str) -> None:
    """Raise ``ShapeError`` unless every position is one of ``count``: a negative one would count from the end."""
    if positions and not 0 <= min(positions) <= max(positions) < count:
        got = min(positions) if min(positions) < 0 else max(positions)
        raise ShapeError(expected(f"positions among {count}", of=of, got=got, do="make more angles, or check the positions"))


def check_indices(numbers: Sequence[int], count: int, what: str, of: str) -> None:
    """Raise ``ArgumentError`` unless each of ``numbers`` is an index of one of ``count``; ``what`` they are, in a word of the plural."""
    for number in numbers:
        if not 0 <= number < count:
            raise ArgumentError(expected(f"{what} below {count}", of=of, got=number, do="check the table"))


def check_once(x: torch.Tensor, of: str) -> None:
    """Raise ``ArgumentError`` where an index of 0 and above comes twice in ``x``, so that two would write to one place."""
    if not _readable(x, of):
        return
    counts = torch.bincount(x[x >= 0].flatten())
    if counts.numel() and int(counts.max()) > 1:
        got = f"{int(counts.argmax())} twice"
        raise ArgumentError(expected("each index at most once", of=of, got=got, do="pass what the forward returned"))


def check_counts_fit(sizes: torch.Tensor, factors: Sequence[int], bounds: Sequence[int], of: str) -> None:
    """Raise ``ArgumentError`` unless ``sizes`` are at least 0, and their sum times each of ``factors`` is at most the bound beside it."""
    check_range(sizes, 0, None, of)
    if not (sizes.is_cpu and factors):
        return
    total = sum(sizes.flatten().tolist())
    for factor, bound in zip(factors, bounds, strict=True):
        if not 0 <= total * factor <= bound:
            of, got = f"{of}, which add up to {total}", f"{factor} times as many"
            raise ArgumentError(expected(f"offsets from 0 to {bound}", of=of, got=got, do="pass smaller sizes, or offsets of a wider type"))
