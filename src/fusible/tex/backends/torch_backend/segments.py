"""Which sequence each token of packed sequences belongs to, computed on the tokens' device."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.errors import ShapeError, expected
from fusible.tex.calls.index_checks import check_sequences
from fusible.tex.formulas.segments import Segments

__all__ = ["segments"]


def segments(tokens: int, ends: Tensor, of_lengths: Tensor | None = None) -> Segments[Tensor]:
    """The segments of ``tokens`` tokens between the cumulative lengths ``ends [b + 1]``: a token's sequence is the last one that has begun, and of
    two that begin at once the later one. ``of_lengths``: cumulative lengths of which the sequences are as long, where they are padded.

    Raises ``ShapeError`` for no entry at all, and ``ArgumentError`` for sequences that overlap or reach past the tokens, where ``ends`` lies on the
    host.
    """
    if not ends.shape[0]:
        raise ShapeError(expected("[b + 1]", of="cu_seqlens", got=list(ends.shape), do="pass the cumulative lengths, from 0 on"))
    starts, lengths = ends[:-1], torch.diff(ends if of_lengths is None else of_lengths)
    check_sequences(starts, lengths, tokens, "cu_seqlens")
    if not starts.shape[0]:  # no token is of a sequence: as of one that has none
        starts = lengths = ends.new_zeros(1)
    token = torch.arange(tokens, device=starts.device, dtype=torch.int32)
    starts, lengths = starts.int().contiguous(), lengths.int()
    sequence = torch.searchsorted(starts, token, right=True, out_int32=True).sub_(1)
    inside = sequence >= 0
    sequence.clamp_(0)
    start, length = starts.index_select(0, sequence), lengths.index_select(0, sequence)
    position = token.sub_(start)
    return Segments(sequence, position, length, inside.logical_and_(position < length), start)
