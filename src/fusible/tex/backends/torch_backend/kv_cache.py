"""A cache of keys and values: where the tokens of a sequence are, in pages or in a row of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.errors import DTypeError, ShapeError, expected
from fusible.tex.attention_layout import format_name
from fusible.tex.kv_cache_call import check_cache_lengths, check_cache_pages

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
    starts, cached = (_integers(getattr(call, of), of)[: call.b + 1] for of in ("cu_new_lens", "cu_cached_lens"))
    name = format_name(call.kv_format, "THD" if call.new_k.ndim == 3 else "BSHD")
    pairs = ((call.new_k, call.k_cache), (call.new_v, call.v_cache))
    table = None if call.page_table is None else _integers(call.page_table, "page_table")
    for new, cache in pairs:
        _check(call, name, new, cache, starts, cached, table)
    for new, cache in pairs:
        if call.is_non_paged and call.page_table is not None:
            cache[: call.b] = cache[call.page_table.flatten()[: call.b].long()]
        for i in range(call.b):
            first, count = starts[i], starts[i + 1] - starts[i]
            tokens = new[first : first + count] if name == "THD" else (new[:count, i] if name == "SBHD" else new[i, :count])
            cache[_places(call, i, cache, cached[i + 1] - cached[i], count)] = tokens.to(cache.dtype)


def _integers(x: Tensor, of: str) -> list[int]:
    if x.is_floating_point() or x.is_complex() or x.dtype is torch.bool:
        raise DTypeError(expected("int32", of=f"{of} of copy_to_kv_cache", got=x.dtype, do="pass whole numbers"))
    return x.flatten().tolist()


def _check(call: Any, name: str, new: Tensor, cache: Tensor, starts: list[int], cached: list[int], table: list[int] | None) -> None:
    """Raise for a length or a page that is not in the tensors."""
    per, size = call.max_pages_per_seq, cache.shape[1]
    sequences = call.b if name == "THD" else new.shape[name.index("B")]
    if sequences < call.b:
        raise ShapeError(expected(f"tokens of {call.b} sequences", of="copy_to_kv_cache", got=list(new.shape), do="pass those of each"))
    tokens = new.shape[0] if name == "THD" else new.shape[name.index("S")]
    check_cache_lengths(starts, cached, tokens, size if call.is_non_paged else per * size, packed=name == "THD")
    if table is None:
        return
    if call.is_non_paged:
        return check_cache_pages(table[: call.b], cache.shape[0])
    for i in range(call.b):
        check_cache_pages(table[i * per : i * per + -(-(cached[i + 1] - cached[i]) // size)], cache.shape[0])


def _places(call: Any, i: int, cache: Tensor, end: int, count: int) -> tuple[Tensor | int, Tensor]:
    """The pages of the last ``count`` of the ``end`` tokens of sequence i, and where each stands in its page."""
    positions = torch.arange(end - count, end, device=cache.device)
    if call.is_non_paged:
        return i, positions
    size = cache.shape[1]
    row = call.page_table.flatten()[i * call.max_pages_per_seq : (i + 1) * call.max_pages_per_seq]
    return row[positions // size].long(), positions % size
