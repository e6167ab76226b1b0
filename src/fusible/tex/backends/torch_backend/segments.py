"""Which sequence each token of packed sequences belongs to, computed on the tokens' device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusible.tex.index_checks import check_sequences

__all__ = ["Segments", "segments"]


@dataclass(frozen=True)
class Segments:
    """Per token (int32 ``[t]``): its sequence, where that begins, the token's position there, the sequence's length; and whether it is in one."""

    sequence: Tensor
    start: Tensor
    position: Tensor
    length: Tensor
    inside: Tensor


def segments(tokens: int, starts: Tensor, lengths: Tensor) -> Segments:
    """The segments of ``tokens`` tokens: a token's sequence is the last one that has begun, and of two that begin at once the later one.

    Raises ``ArgumentError`` for sequences that overlap or reach past the tokens, where ``starts`` and ``lengths`` lie on the host.
    """
    check_sequences(starts, lengths, tokens, "cu_seqlens")
    token = torch.arange(tokens, device=starts.device, dtype=torch.int32)
    starts, lengths = starts.int().contiguous(), lengths.int()
    sequence = torch.searchsorted(starts, token, right=True, out_int32=True).sub_(1)
    inside = sequence >= 0
    sequence.clamp_(0)
    start, length = starts.index_select(0, sequence), lengths.index_select(0, sequence)
    position = token.sub_(start)
    return Segments(sequence, start, position, length, inside.logical_and_(position < length))
