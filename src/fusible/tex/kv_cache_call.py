"""The checks of ``copy_to_kv_cache`` that its backends share."""

from __future__ import annotations

import math
from typing import Any

from fusible.errors import ArgumentError, ShapeError, expected

__all__ = ["check_cache_call"]


def check_cache_call(call: Any) -> None:
    """Raise for arguments that do not fit one another; ``call`` has the declared parameters as attributes."""
    for name, lengths in (("cu_new_lens", call.cu_new_lens), ("cu_cached_lens", call.cu_cached_lens)):
        if math.prod(lengths.shape) <= call.b:
            got = list(lengths.shape)
            raise ShapeError(expected(f"[{call.b + 1}]", of=f"{name} of copy_to_kv_cache", got=got, do="pass the cumulative lengths of b sequences"))
    for name, new, cache in (("k", call.new_k, call.k_cache), ("v", call.new_v, call.v_cache)):
        if cache.ndim != 4 or new.ndim not in (3, 4) or tuple(new.shape[-2:]) != tuple(cache.shape[-2:]):
            got = f"{list(new.shape)} and {list(cache.shape)}"
            wanted = "[.., g, d] and [pages, page_size, g, d]"
            raise ShapeError(expected(wanted, of=f"new_{name} and {name}_cache", got=got, do="pass tokens of the cache's heads"))
    if call.is_non_paged:
        return
    if call.page_table is None:
        raise ArgumentError(expected("a table", of="page_table of a paged cache", got="None", do="pass the pages of each sequence"))
    if math.prod(call.page_table.shape) < call.b * call.max_pages_per_seq:
        got = list(call.page_table.shape)
        raise ShapeError(expected(f"[{call.b}, {call.max_pages_per_seq}]", of="page_table", got=got, do="pass a row of pages for each sequence"))
