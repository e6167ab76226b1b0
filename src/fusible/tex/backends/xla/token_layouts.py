"""Tokens of sequences one after the other, and in rows of equal length, on lazy tensors."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.segments import lengths, thd_segments
from fusible.tex.calls.attention_convert import check_convert
from fusible.tex.interface.attention import Attention

__all__ = ["TokenLayoutKernels", "in_rows", "in_sequence"]


class TokenLayoutKernels(Attention):
    def convert_thd_to_bshd(self, tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Any:
        check_convert(tensor, cu_seqlens, b, 1, "convert_thd_to_bshd")
        cu = lazy.cast(cu_seqlens, lazy.int32)[: b + 1]
        rows = in_rows(tensor, cu, max_seq_len)
        inside: Any = lazy.iota((1, max_seq_len), 1, lazy.int32) < lengths(cu)[:, None]
        return lazy.where(_beside(inside, rows), rows, lazy.zeros((), rows.dtype))

    def convert_bshd_to_thd(self, tensor: Tensor, cu_seqlens: Tensor, t: int) -> Any:
        check_convert(tensor, cu_seqlens, tensor.shape[0], 2, "convert_bshd_to_thd")
        return in_sequence(tensor, lazy.cast(cu_seqlens, lazy.int32)[: tensor.shape[0] + 1], t)


def in_rows(x: Tensor, cu: Tensor, longest: int, starts: Tensor | None = None) -> Tensor:
    """``[t, ...] -> [b, longest, ...]``: the first ``longest`` tokens from each sequence's start on, whether or not they are its own. ``cu``: int32
    ``[b + 1]``; sequence i begins at ``starts[i]`` (default ``cu[i]``)."""
    begin = cu[:-1] if starts is None else starts
    if not x.shape[0]:
        return lazy.zeros((begin.shape[0], longest, *x.shape[1:]), x.dtype)
    return lazy.gather(x, 0, lazy.minimum(begin[:, None] + lazy.iota((1, longest), 1, lazy.int32), x.shape[0] - 1))


def in_sequence(rows: Tensor, cu: Tensor, tokens: int, starts: Tensor | None = None) -> Tensor:
    """The inverse of ``in_rows``, ``[b, s, ...] -> [tokens, ...]``: 0 where no sequence is, and past its first ``s`` tokens."""
    b, s, *rest = rows.shape
    if not b * s or not tokens:
        return lazy.zeros((tokens, *rest), rows.dtype)
    of = thd_segments(tokens, cu, starts)
    inside: Any = of.inside & (of.position < s)
    place = of.sequence * s + lazy.minimum(of.position, s - 1)
    taken = lazy.gather(lazy.reshape(rows, (b * s, *rest)), 0, lazy.where(inside, place, 0))
    return lazy.where(_beside(inside, taken), taken, lazy.zeros((), rows.dtype))


def _beside(condition: Tensor, x: Tensor) -> Tensor:
    """``condition`` with as many dimensions as ``x``."""
    return lazy.reshape(condition, (*condition.shape, *[1] * (x.ndim - condition.ndim)))
