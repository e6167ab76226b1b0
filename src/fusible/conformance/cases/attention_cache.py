"""Records of the cache of keys and values, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusible.conformance.table import Output, Sample, random, record
from fusible.tex.enums import NVTE_QKV_Format

__all__ = []


@record("copy_to_kv_cache")
def copy_to_kv_cache(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    new, cached, page, each = (3, 0, 1, 5), (3, 4, 11, 9), 4, 3

    def counts(lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

    pages = len(new) * each + 1
    table = torch.randperm(pages, generator=generator)[: pages - 1].view(len(new), each).int()
    news = [random(generator, (sum(new), 2, 44), dtype) for _ in range(2)]
    caches = [random(generator, (pages, page, 2, 44), dtype) for _ in range(2)]
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
    yield Sample("pages", arguments, (Output("k_cache", wanted[0]), Output("v_cache", wanted[1])))
