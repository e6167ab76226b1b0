"""Records of the cache of keys and values, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.table import Arguments, Output, Sample, random, record
from fusible.tex.enums import NVTE_QKV_Format

__all__ = []


@record("copy_to_kv_cache")
def copy_to_kv_cache(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    def counts(lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

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
