"""The checks of indices that come as data. They read tensors of the host alone: on a device a check would wait for it."""

from __future__ import annotations

from typing import Any

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected

__all__ = ["check_cumulative", "check_positions", "check_sequences"]


def _readable(x: Any, of: str) -> bool:
    if x.is_floating_point() or x.is_complex():
        raise DTypeError(expected("int32", of=of, got=x.dtype, do="pass whole numbers"))
    return x.is_cpu


def check_cumulative(ends: Any, limit: int, of: str) -> None:
    """Raise ``ArgumentError`` unless ``0 <= ends[0] <= ends[1] <= .. <= limit``, ``ShapeError`` for a tensor of another rank or without elements."""
    if ends.ndim != 1 or not ends.shape[0]:
        raise ShapeError(expected("[b + 1]", of=of, got=list(ends.shape), do="pass cumulative lengths from 0 on"))
    if not _readable(ends, of):
        return
    numbers = ends.tolist()
    if numbers[0] < 0 or any(after < before for before, after in zip(numbers, numbers[1:], strict=False)):
        raise ArgumentError(expected("cumulative lengths from 0 on", of=of, got=numbers, do="pass ones that never decrease"))
    if numbers[-1] > limit:
        raise ArgumentError(expected(f"at most {limit} tokens", of=of, got=numbers[-1], do="pass the lengths of the tensors"))


def check_sequences(starts: Any, lengths: Any, limit: int, of: str) -> None:
    """Raise ``ArgumentError`` unless every sequence lies within ``limit`` tokens, and no two share one."""
    if not (_readable(starts, of) and _readable(lengths, of)):
        return
    end = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if length < 0 or start < end or start + length > limit:
            got, wanted = f"tokens {start} to {start + length} after {end}", f"sequences one after another in {limit} tokens"
            raise ArgumentError(expected(wanted, of=of, got=got, do="check the cumulative lengths"))
        end = start + length


def check_positions(positions: Any, count: int, of: str) -> None:
    """Raise ``ShapeError`` unless every position is one of ``count``: a negative one would count from the end."""
    if not (_readable(positions, of) and positions.numel()):
        return
    least, largest = (int(bound) for bound in positions.aminmax())
    if least < 0 or largest >= count:
        got = least if least < 0 else largest
        raise ShapeError(expected(f"positions among {count}", of=of, got=got, do="make more angles, or check the positions"))
