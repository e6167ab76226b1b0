"""A cache of keys and values: where the tokens of a sequence are, in pages or in a row of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.attention_layout import format_name

__all__ = ["capacity", "gathered", "page_size", "put"]


def page_size(pages: Tensor, name: str) -> int:
    """The tokens of a page of ``pages``, which are of the format ``name``."""
    return pages.shape[name.index("S")]


def capacity(pages: Tensor, table: Tensor, name: str, longest: int) -> int:
    """How many tokens of a sequence its row of the table reaches, and at most ``longest``, where that is known."""
    reached = table.shape[1] * page_size(pages, name)
    return min(reached, longest) if longest > 0 else reached


def gathered(pages: Tensor, table: Tensor, name: str, tokens: int) -> Tensor:
    """The first ``tokens`` tokens of each of the table's sequences, ``[b, g, tokens, d]``.

    Entries that stand for no page read some page, which no length reaches.
    """
    pages = pages.transpose(0, 1) if name == "SBHD" else pages
    wanted = table[:, : -(-tokens // max(pages.shape[1], 1))].long().clamp_(0, max(pages.shape[0] - 1, 0))
    return pages[wanted].flatten(1, 2)[:, :tokens].transpose(1, 2)


def put(call: Any) -> None:
    """Write the new tokens of ``copy_to_kv_cache`` to its caches, ``[pages, page_size, g, d]``."""
    starts, cached = call.cu_new_lens.tolist(), call.cu_cached_lens.tolist()
    name = format_name(call.kv_format, "THD" if call.new_k.ndim == 3 else "BSHD")
    places = [_places(call, i, cached[i + 1] - cached[i], starts[i + 1] - starts[i]) for i in range(call.b)]
    for new, cache in ((call.new_k, call.k_cache), (call.new_v, call.v_cache)):
        if call.is_non_paged and call.page_table is not None:
            cache[: call.b] = cache[call.page_table.flatten()[: call.b].long()]
        for i, place in enumerate(places):
            first, count = starts[i], starts[i + 1] - starts[i]
            tokens = new[first : first + count] if name == "THD" else (new[:count, i] if name == "SBHD" else new[i, :count])
            cache[place] = tokens.to(cache.dtype)


def _places(call: Any, i: int, end: int, count: int) -> tuple[Tensor | int, Tensor]:
    """The pages of the last ``count`` of the ``end`` tokens of sequence i, and where each stands in its page."""
    positions = torch.arange(end - count, end, device=call.k_cache.device)
    if call.is_non_paged:
        return i, positions
    size = call.k_cache.shape[1]
    row = call.page_table.flatten()[i * call.max_pages_per_seq : (i + 1) * call.max_pages_per_seq]
    return row[positions // size].long(), positions % size
