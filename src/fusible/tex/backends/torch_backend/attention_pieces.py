"""The pieces of an attention problem that are computed at once, and where each lies in Q, K, V and O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusible.tex.attention_buffers import heads_first
from fusible.tex.attention_call import PADDING, bounds, check_counts
from fusible.tex.attention_layout import Layout

__all__ = ["Piece", "operands", "pieces", "take"]


@dataclass(frozen=True)
class Piece:
    """``count`` sequences from the ``first`` on, of equal lengths in memory; with ``lengths_*`` (``[count]``), only that many tokens count."""

    first: int
    count: int
    sq: int
    skv: int
    start_q: int = 0
    start_kv: int = 0
    lengths_q: Tensor | None = None
    lengths_kv: Tensor | None = None


def take(x: Tensor, name: str, piece: Piece, *, kv: bool) -> Tensor:
    """The piece's part of ``x`` as ``[count, heads, s, d]``, a view."""
    start, length = (piece.start_kv, piece.skv) if kv else (piece.start_q, piece.sq)
    if name == "THD":
        return x[start : start + piece.count * length].unflatten(0, (piece.count, length)).permute(0, 2, 1, 3)
    return heads_first(x, name)[piece.first : piece.first + piece.count, :, :length]


def pieces(lay: Layout, call: Any) -> Iterator[Piece]:
    """The pieces of a call: all sequences at once where they are equally long in memory, else one by one."""
    cu_q, cu_kv = call.cu_seqlens_q, call.cu_seqlens_kv
    if lay.q != "THD" and lay.kv != "THD":
        b, _, sq, _ = heads_first(call.Q, lay.q).shape
        skv = heads_first(call.K, lay.kv).shape[2]
        if int(call.attn_mask_type) in PADDING:
            yield Piece(0, b, sq, skv, lengths_q=torch.diff(bounds(cu_q, "q")), lengths_kv=torch.diff(bounds(cu_kv, "kv")))
        else:
            yield Piece(0, b, sq, skv)
        return
    starts_q, lengths_q = _sequences(bounds(cu_q, "q"), call.cu_seqlens_q_padded)
    starts_kv, lengths_kv = _sequences(bounds(cu_kv, "kv"), call.cu_seqlens_kv_padded)
    count = len(lengths_q)
    check_counts(count, len(lengths_kv))
    if count and _uniform(starts_q, lengths_q) and _uniform(starts_kv, lengths_kv):
        yield Piece(0, count, lengths_q[0], lengths_kv[0], starts_q[0], starts_kv[0])
        return
    for i in range(count):
        yield Piece(i, 1, lengths_q[i], lengths_kv[i], starts_q[i], starts_kv[i])


def _sequences(cu: Tensor, padded: Tensor | None) -> tuple[list[int], list[int]]:
    ends = cu.tolist()
    starts = ends[:-1] if padded is None else padded.tolist()[: len(ends) - 1]
    return starts, [after - before for before, after in zip(ends, ends[1:], strict=False)]


def _uniform(starts: list[int], lengths: list[int]) -> bool:
    return len(set(lengths)) == 1 and all(start == starts[0] + i * lengths[0] for i, start in enumerate(starts))


def operands(lay: Layout, piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V of one piece."""
    return take(q, lay.q, piece, kv=False), take(k, lay.kv, piece, kv=True), take(v, lay.kv, piece, kv=True)
