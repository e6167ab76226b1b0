"""The checks of ``copy_to_kv_cache`` that its backends share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.calls.index_checks import check_indices
from fusible.tex.interface.declare import CallArguments

__all__ = ["check_cache_call", "check_cache_indices"]


def check_cache_call(call: CallArguments) -> None:
    """Raise for arguments that do not fit one another; ``call`` has the declared parameters as attributes."""
    _check_numbers(call)
    _check_tokens(call)
    (_check_rows if call.is_non_paged else _check_pages)(call)


def _check_numbers(call: CallArguments) -> None:
    for name, lengths in (("cu_new_lens", call.cu_new_lens), ("cu_cached_lens", call.cu_cached_lens)):
        if math.prod(lengths.shape) <= call.b:
            got = list(lengths.shape)
            raise ShapeError(expected(f"[{call.b + 1}]", of=f"{name} of copy_to_kv_cache", got=got, do="pass the cumulative lengths of b sequences"))
    if call.b < 0 or (not call.is_non_paged and call.max_pages_per_seq < 1):
        got = f"{call.b} of {call.max_pages_per_seq} pages"
        raise ArgumentError(expected("b >= 0 sequences of at least one page", of="copy_to_kv_cache", got=got, do="pass such numbers"))


def _check_tokens(call: CallArguments) -> None:
    """New keys and values are of the caches' heads, and alike."""
    for name, new, cache in (("k", call.new_k, call.k_cache), ("v", call.new_v, call.v_cache)):
        if cache.ndim != 4 or new.ndim not in (3, 4) or tuple(new.shape[-2:]) != tuple(cache.shape[-2:]):
            got = f"{list(new.shape)} and {list(cache.shape)}"
            wanted = "[.., g, d] and [pages, page_size, g, d]"
            of = f"new_{name} and {name}_cache of copy_to_kv_cache"
            raise ShapeError(expected(wanted, of=of, got=got, do="pass tokens of the cache's heads"))
    # What one of the two is refused for must not be found out when the other is written.
    for name, x, like in (("new_v", call.new_v, call.new_k), ("v_cache", call.v_cache, call.k_cache)):
        if tuple(x.shape[:-1]) != tuple(like.shape[:-1]):
            wanted = f"[{', '.join(map(str, like.shape[:-1]))}, d]"
            raise ShapeError(expected(wanted, of=f"{name} of copy_to_kv_cache", got=list(x.shape), do="pass keys and values of the same tokens"))
        if x.dtype != like.dtype or x.device != like.device:
            got = f"{x.dtype} on {x.device}"
            do = "pass keys and values alike"
            raise DTypeError(expected(f"{like.dtype} on {like.device}", of=f"{name} of copy_to_kv_cache", got=got, do=do))


def _check_rows(call: CallArguments) -> None:
    """Of caches with a row for each sequence."""
    if min(call.k_cache.shape[0], call.v_cache.shape[0]) < call.b:
        got = f"{call.k_cache.shape[0]} and {call.v_cache.shape[0]}"
        raise ShapeError(expected(f"{call.b} rows", of="k_cache and v_cache", got=got, do="pass a row for each sequence"))
    if call.page_table is not None and math.prod(call.page_table.shape) < call.b:
        raise ShapeError(expected(f"[{call.b}]", of="page_table", got=list(call.page_table.shape), do="pass the row of each sequence"))


def _check_pages(call: CallArguments) -> None:
    """Of caches in pages, which a table gives to sequences."""
    if min(call.k_cache.shape[1], call.v_cache.shape[1]) < 1:
        got = f"{list(call.k_cache.shape)} and {list(call.v_cache.shape)}"
        raise ShapeError(expected("pages of at least one token", of="k_cache and v_cache", got=got, do="make larger pages"))
    if call.page_table is None:
        of = "page_table of copy_to_kv_cache with a paged cache"
        raise ArgumentError(expected("a table", of=of, got="None", do="pass the pages of each sequence"))
    if math.prod(call.page_table.shape) < call.b * call.max_pages_per_seq:
        wanted, got = f"[{call.b}, {call.max_pages_per_seq}]", list(call.page_table.shape)
        raise ShapeError(expected(wanted, of="page_table of copy_to_kv_cache", got=got, do="pass a row of pages for each sequence"))


def _check_lengths(new: Sequence[int], cached: Sequence[int], tokens: int, room: int, *, packed: bool) -> None:
    """Raise ``ArgumentError`` for cumulative lengths that are none, or that reach past the ``tokens`` of a call or the ``room`` of a sequence.

    ``packed``: sequences lie one after another, and ``tokens`` is of all of them.
    """
    for name, ends in (("cu_new_lens", new), ("cu_cached_lens", cached)):
        if ends[0] < 0 or any(after < before for before, after in itertools.pairwise(ends)):
            wanted = "cumulative lengths from 0 on"
            raise ArgumentError(expected(wanted, of=f"{name} of copy_to_kv_cache", got=list(ends), do="pass ones that never decrease"))
    for i in range(len(new) - 1):
        added, held = new[i + 1] - new[i], cached[i + 1] - cached[i]
        if added > held or held > room:
            wanted = f"new tokens that fit in {room}"
            raise ArgumentError(expected(wanted, of="cu_cached_lens of copy_to_kv_cache", got=f"{added} of {held}", do="check the lengths"))
        if (new[i + 1] if packed else added) > tokens:
            of, got = "cu_new_lens of copy_to_kv_cache", new[i + 1] if packed else added
            raise ArgumentError(expected(f"at most {tokens} tokens", of=of, got=got, do="pass the lengths of new_k and new_v"))


def check_cache_indices(call: CallArguments, name: str) -> None:
    """Raise ``ArgumentError`` or ``ShapeError`` for a length or a page that is not in the tensors of ``copy_to_kv_cache``, whose tokens come in the
    format ``name``; the indices lie on the host."""
    starts, cached = (x.flatten().tolist()[: call.b + 1] for x in (call.cu_new_lens, call.cu_cached_lens))
    table = None if call.page_table is None else call.page_table.flatten().tolist()
    per = call.max_pages_per_seq
    for new, cache in ((call.new_k, call.k_cache), (call.new_v, call.v_cache)):
        size = cache.shape[1]
        sequences = call.b if name == "THD" else new.shape[name.index("B")]
        if sequences < call.b:
            of, got = "new_k and new_v of copy_to_kv_cache", list(new.shape)
            raise ShapeError(expected(f"tokens of {call.b} sequences", of=of, got=got, do="pass those of each"))
        tokens = new.shape[0] if name == "THD" else new.shape[name.index("S")]
        _check_lengths(starts, cached, tokens, size if call.is_non_paged else per * size, packed=name == "THD")
        if table is None:
            continue
        if call.is_non_paged:
            check_indices(table[: call.b], cache.shape[0], "pages", "page_table of copy_to_kv_cache")
            continue
        for i in range(call.b):
            used = -(-(cached[i + 1] - cached[i]) // size)
            check_indices(table[i * per : i * per + used], cache.shape[0], "pages", "page_table of copy_to_kv_cache")
