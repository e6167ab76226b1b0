"""Records of packed sequences that are divided between ranks, token by token. The last two tokens belong to no sequence."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fusible.conformance.cases.movement import numbers
from fusible.conformance.special import plant
from fusible.conformance.table import Found, Output, Sample, random, record

__all__ = []

_LENGTHS = (4, 6, 0, 2)
_STARTS = (0, 4, 10, 10)
_TOKENS, _HEADS, _WIDTH = 14, 301, 4
_MOVED = (torch.bfloat16, torch.float32, torch.uint8)
_SEQUENCES = tuple(zip(_STARTS, _LENGTHS, strict=True))


def counts() -> Tensor:
    return torch.tensor((*_STARTS, 12), dtype=torch.int32)


def half(which: int) -> list[int]:
    """The tokens of all first (0) or second (1) halves."""
    return [start + which * (n // 2) + i for start, n in _SEQUENCES for i in range(n // 2)]


def bounds(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@record("thd_read_half_tensor", dtypes=_MOVED)
def read_half(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for which in (0, 1):
        x, pair = numbers(generator, (_TOKENS, 2, 303), dtype), numbers(generator, (2, _TOKENS, 2, 303), dtype)
        wanted = [torch.cat((y[half(which)], torch.zeros_like(y[:1]))) for y in (x, *pair)]
        named = {"cu_seqlens": counts(), "half_idx": which}
        yield Sample(f"half {which}", {"tensor": x, **named}, (Output(None, wanted[0]),))
        yield Sample(f"half {which} of two", {"tensor": pair, **named}, (Output(None, torch.stack(wanted[1:])),))


def by_sequence(lse: Tensor, longest: int, halved: bool, rest: float) -> Tensor:
    """``[h, t]``, or with ``halved`` ``[h, t / 2]`` of one half, as ``[b, h, longest]``, with ``rest`` where there is no token."""
    rows = torch.full((len(_LENGTHS), lse.shape[0], longest), rest, dtype=lse.dtype)
    for i, (start, n) in enumerate(_SEQUENCES):
        start, n = (start // 2, n // 2) if halved else (start, n)
        rows[i, :, :n] = lse[:, start : start + n]
    return rows


def laid(lse: Tensor, packed: bool, halved: bool = False, rest: float = 7.0) -> Tensor:
    """The logsumexps in the layout of an argument, which has more columns than there are queries."""
    if packed:
        return torch.cat((lse, torch.full((lse.shape[0], 2), rest, dtype=lse.dtype)), 1) if halved else lse.clone()
    return by_sequence(lse, 4 if halved else 8, halved, rest)


@record("thd_second_half_lse_correction", dtypes=(torch.float32, torch.float64))
def lse_correction(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    second = half(1)
    for packed, more in ((True, True), (False, True), (True, False)):
        lse, step = random(generator, (_HEADS, _TOKENS), dtype), random(generator, (_HEADS, 6), torch.float32)
        step[0, 1] = lse[1, second[2]] = -torch.inf
        merged = lse.double().clone()
        for i, token in enumerate(second):
            merged[:, token] = torch.logaddexp(lse[:, token].double(), step[:, i].double())
        of_step = laid(step, packed, True) if more else step
        arguments = {"lse": laid(lse, packed), "lse_per_step": of_step, "cu_seqlens": counts(), "lse_packed": packed}
        untouched = laid(torch.zeros(_HEADS, _TOKENS).index_fill(1, torch.tensor(second), 1.0), packed) != 1
        outputs = (
            Output("lse", laid(merged, packed), dtype, 1, 2.0),
            Output("lse", keeping(arguments["lse"].clone(), untouched, "lse", False), dtype),
        )
        yield Sample(f"packed {packed}, more columns than tokens {more}", arguments, outputs)
    # The first two tokens belong to no sequence, and the next four to one.
    lse, step = random(generator, (2, 6), dtype), random(generator, (2, 3), torch.float32)
    merged = lse.double().clone()
    merged[:, 4:] = torch.logaddexp(lse[:, 4:].double(), step[:, 1:].double())
    arguments = {"lse": lse, "lse_per_step": step, "cu_seqlens": bounds([2, 6]), "lse_packed": True}
    yield Sample("tokens before the first sequence", arguments, (Output("lse", merged, dtype, 1, 2.0),))


def keeping(former: Tensor, untouched: Tensor, name: str, signed: bool = True) -> Found:
    """The former values where the call must not change them, and the found ones elsewhere. Without ``signed`` a zero may become one of the other
    sign, as the logsumexp of -0 and -inf does."""
    return lambda result, arguments: torch.where(untouched & ((former != arguments[name]) | signed), former, arguments[name])


@record("thd_read_second_half_lse", dtypes=(torch.float32, torch.float64))
def read_lse(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for packed in (True, False):
        lse = random(generator, (_HEADS, _TOKENS), dtype)
        lse[0, half(1)[:5]] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e6, -1e6], dtype=dtype)
        wanted = laid(lse[:, half(1)].float(), packed, True, 0.0)
        named = {"cu_seqlens": counts(), "lse_packed": packed, "second_half_lse_seqlen": wanted.shape[-1]}
        yield Sample(f"packed {packed}", {"lse": laid(lse, packed), **named}, (Output(None, wanted),))
    named = {"cu_seqlens": bounds([0, 0]), "lse_packed": True, "second_half_lse_seqlen": 3}
    yield Sample("a token of no sequence", {"lse": random(generator, (2, 1), dtype), **named}, (Output(None, torch.zeros(2, 3)),))


@record("thd_out_correction")
def out_correction(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for rescaled, second, packed in itertools.product((False, True), repeat=3):
        yield merging(generator, dtype, rescaled, second, packed)
    # A sequence of two tokens, and two tokens of no sequence: a step of the second half has one token and one logsumexp per head.
    out, step, own = random(generator, (4, 2, _WIDTH), dtype), random(generator, (2, 2, _WIDTH), dtype), random(generator, (2, 1), torch.float32)
    lse, wanted = own.repeat(1, 4) + 1, out.double()
    wanted[1] += step[0].double() * (own.double() - lse[:, 1:2].double()).exp()
    arguments = {
        "out": out, "out_per_step": step, "lse": lse, "lse_per_step": own, "cu_seqlens": bounds([0, 2]), "only_second_half": True, "lse_packed": True,
    }  # fmt: skip
    yield Sample("a step of one token", arguments, (Output("out", wanted, dtype, 2, 2.0), Output(None, None)))


def merging(generator: torch.Generator, dtype: torch.dtype, rescaled: bool, second: bool, packed: bool) -> Sample:
    tokens = half(1) if second else list(range(12))
    shape = (_HEADS, _WIDTH)
    out, step = random(generator, (_TOKENS, *shape), dtype), random(generator, (7 if second else _TOKENS, *shape), dtype)
    old, own = random(generator, (_HEADS, _TOKENS), torch.float32), random(generator, (_HEADS, 6 if second else _TOKENS), torch.float32)
    old[0, tokens[3]] = -torch.inf
    old[1, tokens[4]] = own[1, 4] = -torch.inf
    lse, wanted = old.clone(), out.double()
    for i, token in enumerate(tokens):
        lse[:, token] = (old[:, token].double().exp() + own[:, i].double().exp()).log().float()
        kept, gained = ((part.double() - lse[:, token].double()).exp().nan_to_num(0)[:, None] for part in (old[:, token], own[:, i]))
        wanted[token] = wanted[token] * (kept if rescaled else 1) + step[i].double() * gained
    untouched = torch.tensor([token not in tokens for token in range(_TOKENS)])[:, None, None]
    arguments = {
        "out": out, "out_per_step": step, **({"old_lse": laid(old, packed)} if rescaled else {}), "lse": laid(lse, packed),
        "lse_per_step": laid(own, packed, second), "cu_seqlens": counts(), "only_second_half": second, "lse_packed": packed,
    }  # fmt: skip
    outputs = (Output("out", wanted, dtype, 2, 2.0), Output("out", keeping(out.clone(), untouched, "out")), Output(None, None))
    return Sample(f"old_lse {rescaled} second {second} packed {packed}", arguments, outputs)


_WORDS = [(a, b) for a in ("add", "copy", "zero", "none") for b in ("add", "copy", "zero", "none")]


@record("thd_grad_correction")
def grad_correction(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for words in _WORDS:
        for compact in (False, True):
            if compact != ("none" in words) and not (compact and "zero" in words):
                continue
            # Eighths, whose sums fp32 holds.
            shapes = ((n, 2, 163) for n in (_TOKENS, 7 if compact else _TOKENS))
            grad, step = (plant((torch.randint(-4096, 4097, shape, generator=generator) / 8).to(dtype)) for shape in shapes)
            wanted = grad.clone()
            for which, word in enumerate(words):
                for i, token in enumerate(half(which)):
                    value = step[i if compact else token]
                    wanted[token] = {"add": grad[token] + value, "copy": value, "zero": torch.zeros_like(value), "none": grad[token]}[word]
            named = {"cu_seqlens": counts(), "first_half": words[0], "second_half": words[1]}
            yield Sample(f"{words} compact {compact}", {"grad": grad, "grad_per_step": step, **named}, (Output("grad", wanted),))


def owned(ends: list[int], world: int, rank: int) -> list[int]:
    """The tokens of a rank: of every sequence the chunk ``rank`` and the one as far from the end."""
    found: list[int] = []
    for start, end in itertools.pairwise(ends):
        size = (end - start) // (2 * world)
        for chunk in (rank, 2 * world - 1 - rank):
            found += range(start + chunk * size, start + (chunk + 1) * size)
    return found


_DIVIDED = ((1, [0, 2, 6], 6), (2, [0, 8, 8, 12, 24], 24), (4, [0, 8, 16, 24, 40], 48))
"""Ranks, bounds of sequences, all tokens."""


@record("thd_get_partitioned_indices", dtypes=(torch.int32,))
def partitioned_indices(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for world, ends, total in _DIVIDED:
        for rank in range(world):
            named = {"total_tokens": total, "world_size": world, "rank": rank}
            wanted = bounds(owned([*ends, total], world, rank))
            yield Sample(f"rank {rank} of {world}", {"cu_seqlens": bounds(ends), **named}, (Output(None, wanted),))
    wanted = bounds(owned([0, 8400], 2, 1))
    arguments = {"cu_seqlens": bounds([0, 8400]), "total_tokens": 8400, "world_size": 2, "rank": 1}
    yield Sample("a long sequence", arguments, (Output(None, wanted),))


def reordering(generator: torch.Generator, dtype: torch.dtype, back: bool) -> Iterator[Sample]:
    for world, ends, total in _DIVIDED:
        x = numbers(generator, (total, 2, 45), dtype)
        order = [token for rank in range(world) for token in owned([*ends, total], world, rank)]
        ranked = torch.stack([x[token] for token in order])
        inp, wanted = (ranked, x.clone()) if back else (x, ranked)
        named = {"cu_seqlens": bounds(ends), "cp_size": world, "total_tokens": total}
        yield Sample(f"{world} ranks", {"inp": inp, **named}, (Output(None, wanted),))


record("thd_sequence_order_to_cp_rank_order", dtypes=_MOVED)(partial(reordering, back=False))
record("thd_cp_rank_order_to_sequence_order", dtypes=_MOVED)(partial(reordering, back=True))


@record("thd_copy_valid_tokens_from_per_split_to_rank_local", dtypes=_MOVED)
def copy_valid_tokens(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for starts, lengths in (([0, 4, 4, 10, 12], (3, 0, 6, 1)), ([2, 4, 7, 11, 12], (2, 0, 3, 0)), ([0, 6, 12, 12, 12], (6, 2, 0, 0))):
        out, inp = numbers(generator, (12, 2, 175), dtype), numbers(generator, (12, 2, 175), dtype)
        wanted = out.clone()
        for start, n in zip(starts, lengths, strict=False):
            wanted[start : start + n] = inp[start : start + n]
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        arguments = {"out": out, "inp": inp, "cu_seqlens_padded": bounds(starts), "cu_seqlens": ends}
        yield Sample(f"{lengths} at {starts[:-1]}", arguments, (Output("out", wanted),))
