"""Records of the cache of keys and values, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.cases.attention import largest_of, rounding
from fusible.conformance.table import Arguments, Output, Sample, random, record
from fusible.tex.enums import NVTE_QKV_Format

__all__ = []


def counts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@record("copy_to_kv_cache")
def copy_to_kv_cache(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    new, cached = (3, 0, 1, 5), (3, 4, 11, 9)
    for page, each in ((4, 3), (3, 4)):
        pages = len(new) * each + 1
        table = torch.randperm(pages, generator=generator)[: pages - 1].view(len(new), each).int()
        news = [random(generator, (sum(new), 2, 43), dtype) for _ in range(2)]
        caches = [random(generator, (pages, page, 2, 43), dtype) for _ in range(2)]
        wanted = [cache.clone() for cache in caches]
        for cache, tokens in zip(wanted, news, strict=True):
            place = 0
            for i, count in enumerate(new):
                for position in range(cached[i] - count, cached[i]):
                    cache[table[i, position // page], position % page] = tokens[place]
                    place += 1
        arguments = {
            "new_k": news[0], "new_v": news[1], "k_cache": caches[0], "v_cache": caches[1], "page_table": table, "cu_new_lens": counts(new),
            "cu_cached_lens": counts(cached), "kv_format": NVTE_QKV_Format.NVTE_THD, "b": len(new), "max_ctx_len": max(new),
            "max_seq_len": page * each, "max_pages_per_seq": each, "is_non_paged": False,
        }  # fmt: skip
        yield Sample(f"pages of {page}", arguments, (Output("k_cache", wanted[0]), Output("v_cache", wanted[1])))
    # Sequences of one new token each, in a cache without pages whose rows the table puts in another order.
    news = [random(generator, (1, 3, 2, 5), dtype) for _ in range(2)]
    caches = [random(generator, (4, 6, 2, 5), dtype) for _ in range(2)]
    cached, row = (2, 1, 6), (2, 0, 3)

    def moved(name: str, cache: Tensor, tokens: Tensor) -> Output:
        """What a sequence had before and its new token; of its row beyond, and of no other row, is anything known."""
        former = cache.clone()

        def wanted(result: Any, arguments: Arguments) -> Tensor:
            found = arguments[name].cpu().clone()
            found[3] = former[3]
            for i, end in enumerate(cached):
                found[i, : end - 1], found[i, end - 1] = former[row[i], : end - 1], tokens[0, i]
            return found

        return Output(name, wanted)

    arguments = {
        "new_k": news[0], "new_v": news[1], "k_cache": caches[0], "v_cache": caches[1], "page_table": torch.tensor(row, dtype=torch.int32).view(3, 1),
        "cu_new_lens": counts((1, 1, 1)), "cu_cached_lens": counts(cached), "kv_format": NVTE_QKV_Format.NVTE_SBHD, "b": 3, "max_ctx_len": 1,
        "max_seq_len": 6, "max_pages_per_seq": 1, "is_non_paged": True,
    }  # fmt: skip
    yield Sample("rows", arguments, tuple(moved(name, *pair) for name, *pair in zip(("k_cache", "v_cache"), caches, news, strict=True)))


@dataclass(frozen=True)
class Step:
    """New tokens of sequences that a cache has: ``new`` of them each, to ``cached`` in all, in pages of ``page`` tokens, ``each`` a sequence."""

    label: str
    new: tuple[int, ...]
    cached: tuple[int, ...]
    page: int
    each: int
    heads: int = 2
    groups: int = 2
    width: int = 8
    rotated: int = 0
    interleaved: bool = False
    from_zero: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float = 0.3

    def places(self, i: int) -> range:
        """The positions of the new tokens of sequence i."""
        return range(self.cached[i] - self.new[i], self.cached[i])


_STEPS = (
    Step("one token each", (1, 1, 1), (1, 6, 9), 4, 3),
    Step("rotated, several tokens or none, two to a key", (3, 0, 5, 1), (3, 4, 11, 9), 4, 3, heads=4, rotated=8),
    Step("half rotated in pairs, a window", (2, 4), (7, 5), 3, 4, width=12, rotated=6, interleaved=True, window=(2, -1)),
    Step("rotated from the first angle on, narrow values", (4, 2), (4, 3), 8, 1, groups=1, rotated=8, from_zero=True),
    Step("more than 4,096 elements, another scale", (14, 4), (20, 30), 8, 4, heads=4, groups=2, width=64, scale=0.1),
)


def rotated(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """``x [t, h, d]`` in float64 by the angles ``[t, 1, w]``, of both columns of a pair the same.

    Pair by pair: a matrix, as ``rope`` has it, would take a NaN to all of its row.
    """
    turning, width = x[..., : angles.shape[-1]], angles.shape[-1] // 2
    low, high = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(width), slice(width, None))
    y = x.clone()
    cos, sin = angles.cos(), angles.sin()
    y[..., : 2 * width][..., low] = turning[..., low] * cos[..., low] - turning[..., high] * sin[..., low]
    y[..., : 2 * width][..., high] = turning[..., high] * cos[..., high] + turning[..., low] * sin[..., high]
    return y


def _seen(whole: Tensor, strict: Tensor) -> Any:
    """What is expected of rows among whose values is a NaN or an infinity that they do not see: ``strict``, without those; or NaN, 0 times that, as
    it comes in ``whole`` where a kernel multiplies what it hides."""
    if not (loose := whole.isnan() & ~strict.isnan()).any():
        return whole

    def wanted(result: Any, arguments: Arguments) -> Tensor:
        return torch.where(loose & result.detach().cpu().isnan(), torch.nan, strict)

    return wanted


@record("prim_attention_step")
def prim_attention_step(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for step in _STEPS:
        yield step_sample(step, generator, dtype)


def step_sample(step: Step, generator: torch.Generator, dtype: torch.dtype) -> Sample:
    tokens, pages, values = sum(step.new), len(step.new) * step.each + 1, step.width - 4 * step.from_zero
    q, k, v = (
        random(generator, (tokens, n, w), dtype) for n, w in zip((step.heads, step.groups, step.groups), (step.width,) * 2 + (values,), strict=True)
    )
    caches = [random(generator, (pages, step.page, step.groups, width), dtype) for width in (step.width, values)]
    table = torch.randperm(pages, generator=generator)[: pages - 1].view(len(step.new), step.each).int()
    pages_of = table.clone()  # of entries that no length reaches anything may be there
    for row, cached in zip(table, step.cached, strict=True):
        row[-(-cached // step.page) :] = pages
    starts = torch.tensor([0 if step.from_zero else step.places(i).start for i in range(len(step.new))], dtype=torch.int32)
    angles = torch.rand(step.page * step.each, 1, 1, step.rotated, generator=generator) * 6 if step.rotated else None
    turned = [q.double(), k.double()]
    if angles is not None:
        positions = torch.cat([starts[i] + torch.arange(count) for i, count in enumerate(step.new)])
        turned = [rotated(x, angles.double()[positions][:, 0], step.interleaved) for x in turned]
    # What is rotated is rounded before it is read again.
    turned = [x.to(dtype).double() for x in turned]
    written = [cache.double() for cache in caches]
    for cache, rows in zip(written, (turned[1], v.double()), strict=True):
        for i, part in enumerate(rows.split(step.new)):
            for row, position in zip(part, step.places(i), strict=True):
                cache[table[i, position // step.page], position % step.page] = row
    scale, most, parts, strict = step.scale, 1.0, [], []
    for i, queries in enumerate(turned[0].split(step.new)):
        cached = [cache[pages_of[i].long()].flatten(0, 1)[: step.cached[i]].repeat_interleave(step.heads // step.groups, 1) for cache in written]
        behind = torch.tensor(list(step.places(i)), dtype=torch.long)[:, None] - torch.arange(step.cached[i])
        scores = scale * torch.einsum("ihd,jhd->hij", queries, cached[0])
        most = max(most, scores.abs().max().item() if scores.numel() else 0.0)
        unseen = (behind < 0) | ((behind > step.window[0]) if step.window[0] >= 0 else torch.zeros_like(behind, dtype=torch.bool))
        shares = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hij,jhe->ihe", shares, cached[1]))
        strict.append(torch.einsum("hije->ihe", (shares[..., None] * cached[1].transpose(0, 1)[:, None]).masked_fill(unseen[..., None], 0.0)))
    length = step.width + max(step.cached)
    # Scores are of q and of k, each of which may be rounded the other way where it lies between two numbers.
    size = rounding(dtype, largest_of([v, caches[1]]), length) * most * (4 if step.rotated else 1)
    arguments = {
        "q": q, "k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "page_table": table, "cu_new_lens": counts(step.new),
        "cu_cached_lens": counts(step.cached), "angles": angles, "start_positions": starts if step.rotated and not step.from_zero else None,
        "interleaved": step.interleaved, "max_new_len": max(step.new), "window_size": step.window, "scale": scale,
    }  # fmt: skip
    outputs = (
        Output(None, _seen(torch.cat(parts), torch.cat(strict)), dtype, length, size),
        Output("k_cache", written[0], dtype, 2, 8.0 * max(1.0, 2 * largest_of([k]))),
        Output("v_cache", written[1].to(dtype)),
    )
    return Sample(step.label, arguments, outputs)
