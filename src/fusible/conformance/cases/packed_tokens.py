"""Records of converting tokens between packed and padded layouts, and Q, K, V between interleaved and separate ones. Values are only moved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from fusible.conformance.cases.movement import numbers
from fusible.conformance.table import Output, Sample, record

__all__ = []

_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
_BOUNDS = (0, 3, 3, 8, 9)
"""Four sequences, the second of them empty."""


def counts() -> Tensor:
    return torch.tensor(_BOUNDS, dtype=torch.int32)


def places(longest: int) -> Iterator[tuple[int, int, int]]:
    """``(sequence, position, token)`` of each of the first ``longest`` tokens of the sequences."""
    for i, (start, end) in enumerate(itertools.pairwise(_BOUNDS)):
        for position in range(min(end - start, longest)):
            yield i, position, start + position


@record("convert_thd_to_bshd", dtypes=_DTYPES)
def thd_to_bshd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for trailing, tokens, longest, b in (((2, 250), 11, 6, 4), ((), 9, 5, 4), ((2,), 9, 2, 4), ((4,), 9, 5, 3), ((2,), 0, 3, 0)):
        x = numbers(generator, (tokens, *trailing), dtype)
        wanted = torch.zeros(b, longest, *trailing, dtype=dtype)
        for i, position, token in places(longest):
            if i < b:
                wanted[i, position] = x[token]
        arguments = {"tensor": x, "cu_seqlens": counts(), "b": b, "max_seq_len": longest}
        yield Sample(f"{list(x.shape)} to {list(wanted.shape)}", arguments, (Output(None, wanted),))


@record("convert_bshd_to_thd", dtypes=_DTYPES)
def bshd_to_thd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for trailing, tokens, longest in (((2, 250), 11, 6), ((), 9, 5), ((2,), 9, 2), ((2,), 4, 0)):
        x = numbers(generator, (4, longest, *trailing), dtype)
        wanted = torch.zeros(tokens, *trailing, dtype=dtype)
        for i, position, token in places(longest):
            wanted[token] = x[i, position]
        yield Sample(f"{list(x.shape)}", {"tensor": x, "cu_seqlens": counts(), "t": tokens}, (Output(None, wanted),))
        if longest == 5:  # more bounds than sequences, of which the last one is the longest
            wanted = wanted.clone()
            wanted[8:] = 0
            yield Sample("three of four sequences", {"tensor": x[:3].clone(), "cu_seqlens": counts(), "t": tokens}, (Output(None, wanted),))
            continue
        if longest > 1:
            across = x.transpose(0, 1).contiguous().transpose(0, 1)
            yield Sample(f"{list(x.shape)} strided", {"tensor": across, "cu_seqlens": counts(), "t": tokens}, (Output(None, wanted),))


_SHAPES = ((0, 2, 4, 8), (3, 2, 4, 8), (1, 2, 1, 16), (4, 1, 2, 1), (3, 2, 4, 176))
"""``[s, b, n, h]``"""


@record("fa_prepare_fwd", dtypes=(torch.bfloat16, torch.float16))
def prepare(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for s, b, n, h in _SHAPES:
        # Not from the beginning of its memory.
        whole = torch.cat([numbers(generator, (5,), dtype), numbers(generator, (s * b * n * 3 * h,), dtype)])[5:].view(s, b, n, 3 * h)
        unpacked = torch.stack([whole[..., i * h : (i + 1) * h].permute(1, 0, 2, 3) for i in range(3)])
        yield Sample(f"{[s, b, n, h]}", {"qkvi": whole[..., :h]}, (Output(None, unpacked),))


@record("fa_prepare_bwd", dtypes=(torch.bfloat16, torch.float16))
def prepare_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for s, b, n, h in _SHAPES:
        parts = [numbers(generator, (b, s, n, h), dtype) for _ in range(3)]
        whole = torch.cat([x.permute(1, 0, 2, 3) for x in parts], -1)
        yield Sample(f"{[b, s, n, h]}", dict(zip("qkv", parts, strict=True)), (Output(None, whole),))
