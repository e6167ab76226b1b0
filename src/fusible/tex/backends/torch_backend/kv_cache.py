"""A cache of keys and values: where the tokens of a sequence are, in pages or in a row of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.attention_layout import format_name

__all__ = ["gathered", "put"]


def gathered(pages: Tensor, table: Tensor, name: str) -> Tensor:
    """The tokens of each sequence, ``[b, max_pages * page_size, g, d]``; entries that stand for no page read some page, which no length reaches."""
    pages = pages.transpose(0, 1) if name == "SBHD" else pages
    return pages[table.long().clamp(0, max(pages.shape[0] - 1, 0))].flatten(1, 2)


def put(call: Any, new: Tensor, cache: Tensor) -> None:
    """Write the new tokens of ``copy_to_kv_cache`` to ``cache``, ``[pages, page_size, g, d]``."""
    starts, cached = call.cu_new_lens.tolist(), call.cu_cached_lens.tolist()
    name = format_name(call.kv_format, "THD" if new.ndim == 3 else "BSHD")
    former = call.page_table if call.is_non_paged else None
    if former is not None:
        cache[: call.b] = cache[former.flatten()[: call.b].long()]
    for i in range(call.b):
        count, end = starts[i + 1] - starts[i], cached[i + 1] - cached[i]
        tokens = new[starts[i] : starts[i] + count] if name == "THD" else (new[:count, i] if name == "SBHD" else new[i, :count])
        positions = torch.arange(end - count, end, device=cache.device)
        if call.is_non_paged:
            cache[i, positions] = tokens.to(cache.dtype)
        else:
            pages = call.page_table[i, positions // cache.shape[1]].long()
            cache[pages, positions % cache.shape[1]] = tokens.to(cache.dtype)
