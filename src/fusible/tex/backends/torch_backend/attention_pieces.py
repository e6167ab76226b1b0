"""The pieces of an attention problem, the tiles that are computed at once, and where each lies in Q, K, V and O."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.kv_cache import gathered
from fusible.tex.backends.torch_backend.operands import wide
from fusible.tex.calls.attention import PADDING
from fusible.tex.calls.attention_buffers import heads_first
from fusible.tex.calls.attention_layout import QKVLayout
from fusible.tex.calls.index_relations import check_attention_indices, key_limit
from fusible.tex.interface.declare import CallArguments

__all__ = ["Piece", "batches", "keys_and_values", "pieces", "row_blocks", "take"]


@dataclass(frozen=True)
class Piece:
    """Queries ``row .. row + rows`` of ``count`` sequences from the ``first`` on, of equal lengths in memory.

    With ``lengths_*`` (``[count]``), only that many tokens count.
    """

    first: int
    count: int
    sq: int
    skv: int
    start_q: int = 0
    start_kv: int = 0
    lengths_q: Tensor | None = None
    lengths_kv: Tensor | None = None
    row: int = 0
    rows: int = 0

    def sequences(self, first: int, count: int) -> Piece:
        """``count`` of the piece's sequences, from its ``first`` on."""
        within = slice(first, first + count)
        return replace(
            self,
            first=self.first + first,
            count=count,
            start_q=self.start_q + first * self.sq,
            start_kv=self.start_kv + first * self.skv,
            lengths_q=None if self.lengths_q is None else self.lengths_q[within],
            lengths_kv=None if self.lengths_kv is None else self.lengths_kv[within],
        )


def take(x: Tensor, name: str, piece: Piece, *, kv: bool) -> Tensor:
    """The piece's part of ``x`` as ``[count, heads, s, d]``, a view: the piece's queries, or all of its sequences' keys."""
    start, length = (piece.start_kv, piece.skv) if kv else (piece.start_q, piece.sq)
    if name == "THD":
        part = x[start : start + piece.count * length].unflatten(0, (piece.count, length)).permute(0, 2, 1, 3)
    else:
        part = heads_first(x, name)[piece.first : piece.first + piece.count, :, :length]
    return part if kv else part[:, :, piece.row : piece.row + piece.rows]


def keys_and_values(lay: QKVLayout, call: CallArguments, piece: Piece) -> tuple[Tensor, Tensor]:
    """K and V of a piece's sequences, wide and contiguous: every block of queries reads them."""
    found = []
    for x, table in ((call.K, getattr(call, "page_table_k", None)), (call.V, getattr(call, "page_table_v", None))):
        if table is None:
            part = take(x, lay.kv, piece, kv=True)
        else:
            part = gathered(x, table[piece.first : piece.first + piece.count], lay.kv, piece.skv)
        found.append(wide(part).contiguous())
    return found[0], found[1]


def pieces(lay: QKVLayout, call: CallArguments) -> Iterator[Piece]:
    """The pieces of a call, each of all queries of its sequences: all of these where they are equally long in memory, else one by one."""
    check_attention_indices(call, "attention")
    cu_q, cu_kv = call.cu_seqlens_q, call.cu_seqlens_kv
    if lay.q != "THD" and lay.kv != "THD":
        b, _, sq, _ = heads_first(call.Q, lay.q).shape
        skv = key_limit(call, lay)
        if int(call.attn_mask_type) in PADDING:
            lengths_q, lengths_kv = (torch.diff(cu[: b + 1]) for cu in (cu_q, cu_kv))
            yield Piece(0, b, sq, skv, lengths_q=lengths_q, lengths_kv=lengths_kv, rows=sq)
        else:
            yield Piece(0, b, sq, skv, rows=sq)
        return
    starts_q, lengths_q = _sequences(cu_q, call.cu_seqlens_q_padded)
    starts_kv, lengths_kv = _sequences(cu_kv, call.cu_seqlens_kv_padded)
    count = len(lengths_q)
    if count and _uniform(starts_q, lengths_q) and _uniform(starts_kv, lengths_kv):
        yield Piece(0, count, lengths_q[0], lengths_kv[0], starts_q[0], starts_kv[0], rows=lengths_q[0])
        return
    for i in range(count):
        yield Piece(i, 1, lengths_q[i], lengths_kv[i], starts_q[i], starts_kv[i], rows=lengths_q[i])


def _sequences(cu: Tensor, padded: Tensor | None) -> tuple[list[int], list[int]]:
    ends = cu.tolist()
    starts = ends[:-1] if padded is None else padded.tolist()[: len(ends) - 1]
    return starts, [after - before for before, after in itertools.pairwise(ends)]


def _uniform(starts: list[int], lengths: list[int]) -> bool:
    return len(set(lengths)) == 1 and all(start == starts[0] + i * lengths[0] for i, start in enumerate(starts))


def batches(piece: Piece, call: CallArguments, lay: QKVLayout, share: int) -> Iterator[tuple[Piece, int]]:
    """A piece in batches of sequences, each with how many rows of queries to compute at once.

    The scores of one block of rows are at most ``1 / share`` of the piece's own Q, K, V and O, but at least one row of a sequence; and the keys and
    values of one batch, which a paged cache may hold once for several sequences, at most as many as there are of them.
    """
    q, k, v = call.Q, call.K, call.V
    heads, groups, width = q.shape[lay.q.index("H")], k.shape[lay.kv.index("H")], q.shape[-1] + v.shape[-1]
    budget = piece.count * (heads * piece.sq + groups * piece.skv) * width // share
    row = max(1, heads * piece.skv)
    together = max(1, min(budget // max(1, row * piece.sq), k.numel() // max(1, piece.skv * groups * q.shape[-1])))
    rows = max(1, min(piece.sq, budget // row))
    for first in range(0, piece.count, together):
        yield piece.sequences(first, min(together, piece.count - first)), rows


def row_blocks(piece: Piece, rows: int) -> Iterator[Piece]:
    """A piece in blocks of at most ``rows`` queries."""
    for row in range(0, piece.sq, rows):
        yield replace(piece, row=row, rows=min(rows, piece.sq - row))
