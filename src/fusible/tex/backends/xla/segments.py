"""Which sequence each token of a THD batch belongs to, computed in the program: one program serves any lengths of the same total."""

from __future__ import annotations

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.formulas.segments import Segments

__all__ = ["lengths", "thd_segments"]


def lengths(cu_seqlens: Tensor) -> Tensor:
    """``[b + 1] -> [b]``: the lengths between cumulative bounds."""
    return cu_seqlens[1:] - cu_seqlens[:-1]


def thd_segments(tokens: int, cu_seqlens: Tensor, starts: Tensor | None = None) -> Segments[Tensor]:
    """The segments of ``tokens`` tokens; sequence i begins at ``starts[i]`` (default ``cu_seqlens[i]``).

    A token's sequence is the last one that has begun: the count of starts up to it, less one.
    """
    bounds = lazy.cast(cu_seqlens, lazy.int32)
    size = lengths(bounds)
    begin = bounds[:-1] if starts is None else lazy.cast(starts, lazy.int32)[: size.shape[0]]
    token = lazy.iota((tokens,), 0, lazy.int32)
    begun = lazy.sum(lazy.cast(begin[None, :] <= token[:, None], lazy.int32), 1)
    sequence = lazy.maximum(begun - 1, 0)
    position = token - lazy.gather(begin, 0, sequence)
    length = lazy.gather(size, 0, sequence)
    return Segments(sequence, position, length, (begun > 0) & (position < length))
