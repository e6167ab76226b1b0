"""What backends share of ``copy_to_kv_cache`` and ``prim.attention_step``: checks, and the calls that a step is made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.calls.attention import edges_of_window
from fusible.tex.calls.index_checks import check_indices
from fusible.tex.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type
from fusible.tex.interface.declare import CallArguments

__all__ = ["attention_of_step", "check_cache_call", "check_cache_indices", "check_step", "copy_of_step", "room_of_step"]


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


def _check_lengths(new: Sequence[int], cached: Sequence[int], tokens: int, room: int, *, packed: bool, function: str) -> None:
    """Raise ``ArgumentError`` for cumulative lengths that are none, or that reach past the ``tokens`` of a call or the ``room`` of a sequence.

    ``packed``: sequences lie one after another, and ``tokens`` is of all of them.
    """
    for name, ends in (("cu_new_lens", new), ("cu_cached_lens", cached)):
        if ends[0] < 0 or any(after < before for before, after in itertools.pairwise(ends)):
            wanted = "cumulative lengths from 0 on"
            raise ArgumentError(expected(wanted, of=f"{name} of {function}", got=list(ends), do="pass ones that never decrease"))
    for i in range(len(new) - 1):
        added, in_cache = new[i + 1] - new[i], cached[i + 1] - cached[i]
        if added > in_cache or in_cache > room:
            wanted = f"new tokens that fit in {room}"
            raise ArgumentError(expected(wanted, of=f"cu_cached_lens of {function}", got=f"{added} of {in_cache}", do="check the lengths"))
        if (new[i + 1] if packed else added) > tokens:
            of, got = f"cu_new_lens of {function}", new[i + 1] if packed else added
            raise ArgumentError(expected(f"at most {tokens} tokens", of=of, got=got, do="pass the lengths of the new keys and values"))


def check_cache_indices(call: CallArguments, name: str, function: str = "copy_to_kv_cache") -> None:
    """Raise ``ArgumentError`` or ``ShapeError`` for a length or a page that is not in the tensors of ``copy_to_kv_cache``, whose tokens come in the
    format ``name``; the indices lie on the host. ``function``: what calls it so."""
    starts, cached = (x.flatten().tolist()[: call.b + 1] for x in (call.cu_new_lens, call.cu_cached_lens))
    table = None if call.page_table is None else call.page_table.flatten().tolist()
    per = call.max_pages_per_seq
    for new, cache in ((call.new_k, call.k_cache), (call.new_v, call.v_cache)):
        size = cache.shape[1]
        sequences = call.b if name == "THD" else new.shape[name.index("B")]
        if sequences < call.b:
            of, got = f"new_k and new_v of {function}", list(new.shape)
            raise ShapeError(expected(f"tokens of {call.b} sequences", of=of, got=got, do="pass those of each"))
        tokens = new.shape[0] if name == "THD" else new.shape[name.index("S")]
        _check_lengths(starts, cached, tokens, size if call.is_non_paged else per * size, packed=name == "THD", function=function)
        if table is None:
            continue
        if call.is_non_paged:
            check_indices(table[: call.b], cache.shape[0], "pages", f"page_table of {function}")
            continue
        for i in range(call.b):
            used = -(-(cached[i + 1] - cached[i]) // size)
            check_indices(table[i * per : i * per + used], cache.shape[0], "pages", f"page_table of {function}")


def check_step(call: CallArguments) -> tuple[int, int]:
    """The edges of the window. Raises for arguments of ``prim.attention_step`` that do not fit, but for what numbers in its tensors say."""
    q, k, v, pages = (tuple(x.shape) for x in (call.q, call.k, call.v, call.k_cache))
    fits = len(q) == len(k) == len(v) == 3 and q[0] == k[0] == v[0] and q[2] == k[2] and k[1] == v[1]
    if not fits or call.k.dtype is not call.q.dtype or call.v.dtype is not call.q.dtype:
        got = ", ".join(f"{x.dtype} {list(x.shape)}" for x in (call.q, call.k, call.v))
        wanted = "[t, h, d], [t, g, d] and [t, g, e] of one dtype"
        raise ShapeError(expected(wanted, of="q, k and v of prim.attention_step", got=got, do="pass the heads of the new tokens"))
    if not k[1] or q[1] % k[1]:
        of = "q of prim.attention_step"
        raise ShapeError(expected(f"heads that are a multiple of the {k[1]} of k", of=of, got=q[1], do="share each of k between equally many"))
    alike = call.k_cache.dtype is call.v_cache.dtype is call.q.dtype
    if not alike or len(pages) != 4 or not pages[1] or pages[2:] != k[1:] or tuple(call.v_cache.shape) != (*pages[:2], *v[1:]):
        got = f"{call.k_cache.dtype} {list(pages)} and {call.v_cache.dtype} {list(call.v_cache.shape)}"
        wanted = f"pages of at least one token, [p, s, {k[1]}, {k[2]}] and [p, s, {v[1]}, {v[2]}] of {call.q.dtype}"
        raise ShapeError(expected(wanted, of="k_cache and v_cache of prim.attention_step", got=got, do="pass caches of the tokens' heads"))
    table = tuple(call.page_table.shape)
    if len(table) != 2 or not table[1]:
        of = "page_table of prim.attention_step"
        raise ShapeError(expected("[b, n] with n of at least 1", of=of, got=list(table), do="pass a row of pages for each sequence"))
    for name, lengths in (("cu_new_lens", call.cu_new_lens), ("cu_cached_lens", call.cu_cached_lens)):
        if tuple(lengths.shape) != (table[0] + 1,):
            of = f"{name} of prim.attention_step"
            raise ShapeError(expected(f"[{table[0] + 1}]", of=of, got=list(lengths.shape), do="pass the cumulative lengths of the table's rows"))
    _check_rotation(call, table[0])
    return edges_of_window(call.window_size)


def _check_rotation(call: CallArguments, sequences: int) -> None:
    """Raise ``ShapeError`` for angles and places of a step that are not those of its heads and sequences."""
    angles = None if call.angles is None else tuple(call.angles.shape)
    if angles is not None and (len(angles) != 4 or angles[1:3] != (1, 1) or angles[3] % 2 or angles[3] > call.q.shape[2]):
        wanted, of = f"[positions, 1, 1, w] with an even w up to {call.q.shape[2]}", "angles of prim.attention_step"
        raise ShapeError(expected(wanted, of=of, got=list(angles), do="pass angles of that shape"))
    starts = call.start_positions
    if starts is not None and tuple(starts.shape) != (sequences,):
        of, do = "start_positions of prim.attention_step", "pass the place of each sequence's first new token"
        raise ShapeError(expected(f"[{sequences}]", of=of, got=list(starts.shape), do=do))


def copy_of_step(call: CallArguments, k: Any) -> dict[str, Any]:
    """What a step calls ``copy_to_kv_cache`` with; ``k``: rotated."""
    count, pages = call.page_table.shape
    return {
        "new_k": k, "new_v": call.v, "k_cache": call.k_cache, "v_cache": call.v_cache, "page_table": call.page_table,
        "cu_new_lens": call.cu_new_lens, "cu_cached_lens": call.cu_cached_lens, "kv_format": NVTE_QKV_Format.NVTE_THD, "b": count,
        "max_ctx_len": call.max_new_len, "max_seq_len": room_of_step(call), "max_pages_per_seq": pages, "is_non_paged": False,
    }  # fmt: skip


def attention_of_step(call: CallArguments, q: Any) -> dict[str, Any]:
    """What a step calls ``fused_attn_fwd`` with, once its tokens are in the cache; ``q``: rotated."""
    unset = NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET
    return {
        "max_seqlen_q": call.max_new_len, "max_seqlen_kv": room_of_step(call), "is_training": False, "attn_scale": call.scale, "p_dropout": 0.0,
        "set_zero": True, "qkv_layout": NVTE_QKV_Layout.NVTE_Paged_KV_THD_BSHD_BSHD, "o_format": NVTE_QKV_Format.NVTE_THD,
        "qkv_scale_inv_format": unset, "bias_type": NVTE_Bias_Type.NVTE_NO_BIAS,
        "attn_mask_type": NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK, "softmax_type": NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
        "window_size": call.window_size, "bottom_right_diagonal": True, "cu_seqlens_q": call.cu_new_lens, "cu_seqlens_kv": call.cu_cached_lens,
        "Q": q, "K": call.k_cache, "V": call.v_cache, "fake_dtype": call.q.dtype, "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None,
        "page_table_k": call.page_table, "page_table_v": call.page_table, "s_quantizer": None, "o_quantizer": None, "Bias": None,
        "SoftmaxOffset": None, "rng_gen": None, "rng_elts_per_thread": 0, "return_max_logit": False, "cuda_graph": False,
    }  # fmt: skip


def room_of_step(call: CallArguments) -> int:
    """The tokens that a sequence can have."""
    return call.k_cache.shape[1] * call.page_table.shape[1]
