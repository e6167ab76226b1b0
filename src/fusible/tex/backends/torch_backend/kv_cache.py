"""A cache of keys and values: where the tokens of a sequence are, in pages or in a row of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.tex.calls.kv_cache import check_cache_indices
from fusible.tex.interface.declare import CallArguments

__all__ = ["gathered", "put"]


def gathered(pages: Tensor, table: Tensor, name: str, tokens: int) -> Tensor:
    """The first ``tokens`` tokens of each of the table's sequences, ``[b, g, tokens, d]``.

    Entries that stand for no page read some page, which no length reaches.
    """
    pages = pages.transpose(0, 1) if name == "SBHD" else pages
    wanted = table[:, : -(-tokens // max(pages.shape[1], 1))].long().clamp_(0, max(pages.shape[0] - 1, 0))
    return pages[wanted].flatten(1, 2)[:, :tokens].transpose(1, 2)


def put(call: CallArguments, name: str) -> None:
    """Write the new tokens of ``copy_to_kv_cache`` to its caches, ``[pages, page_size, g, d]``."""
    check_cache_indices(call, name)
    starts, cached = (x.tolist() for x in (call.cu_new_lens, call.cu_cached_lens))
    for new, cache in ((call.new_k, call.k_cache), (call.new_v, call.v_cache)):
        if call.is_non_paged and call.page_table is not None:
            cache[: call.b] = cache[call.page_table.flatten()[: call.b].long()]
        for i in range(call.b):
            first, count = starts[i], starts[i + 1] - starts[i]
            tokens = new[first : first + count] if name == "THD" else (new[:count, i] if name == "SBHD" else new[i, :count])
            cache[_places(call, i, cache, cached[i + 1] - cached[i], count)] = tokens.to(cache.dtype)


def _places(call: CallArguments, i: int, cache: Tensor, end: int, count: int) -> tuple[Tensor | int, Tensor]:
    """The pages of the last ``count`` of the ``end`` tokens of sequence i, and where each stands in its page."""
    positions = torch.arange(end - count, end, device=cache.device)
    if call.is_non_paged:
        return i, positions
    size = cache.shape[1]
    row = call.page_table.flatten()[i * call.max_pages_per_seq : (i + 1) * call.max_pages_per_seq]
    return row[positions // size].long(), positions % size
