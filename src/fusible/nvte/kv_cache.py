"""Attention over what came before: keys and values in pages, and the functions that add to them and read them."""

from __future__ import annotations

from dataclasses import dataclass

from fusible import tex
from fusible.nvte.attention import EVERYWHERE, PLAIN_SCORES, Rotary, ScoreOptions, Sequences, rope_angles, window_edges
from fusible.nvte.tensor import Tensor
from fusible.tex import NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type

__all__ = ["KVCache", "append_kv", "attention_cached", "attention_step"]


@dataclass(frozen=True, eq=False)
class KVCache:
    """The keys and values that one attention has seen, of several sequences.

    ``k``, ``v``: ``[pages, page_size, groups, width]``; position p of sequence i is in page ``page_table[i, p // page_size]`` (int32 ``[count,
    pages of a sequence]``). ``starts``: int32 ``[count]``, the tokens that each has in the cache. ``cu_lengths``: int32 ``[count + 1]``, cumulated,
    with those that the running pass adds.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor
    starts: Tensor
    cu_lengths: Tensor

    @property
    def capacity(self) -> int:
        """The tokens that a sequence can have."""
        return self.k.shape[1] * self.page_table.shape[1]


def append_kv(cache: KVCache, k: Tensor, v: Tensor, sequences: Sequences) -> KVCache:
    """The cache with the new tokens' ``k, v [tokens, groups, width]`` at the ends of their sequences.

    The given cache is used up: its pages are written to, and belong to the result.
    """
    tex.copy_to_kv_cache(
        k.data, v.data, cache.k.data, cache.v.data, cache.page_table.data, sequences.cu_seqlens.data, cache.cu_lengths.data,
        NVTE_QKV_Format.NVTE_THD, sequences.count, sequences.max_seqlen, cache.capacity, cache.page_table.shape[1], False,
    )  # fmt: skip
    return cache


def attention_cached(
    q: Tensor,
    cache: KVCache,
    sequences: Sequences,
    scale: float,
    window_size: tuple[int, int] = EVERYWHERE,
    options: ScoreOptions = PLAIN_SCORES,
    seed: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Causal attention of the new tokens ``q [tokens, heads, width]`` over all that the cache holds of their sequences, themselves included; with
    ``window_size`` and ``options``, over as many of them, and with such scores, as ``attention`` has. ``bias``: ``[sequences or 1, heads or 1, new
    tokens or 1, keys or 1]``, added to the scores; its keys are those of the cache from the first on, as many as the longest sequence has then."""
    lengths, window = (sequences.max_seqlen, cache.capacity), window_edges(window_size, True)
    bias_ = None if bias is None else bias.data
    if bias is not None:  # its own rows and columns bound the lengths, as in ``attention``
        lengths = (bias.shape[2] if bias.shape[2] > 1 else lengths[0], bias.shape[3] if bias.shape[3] > 1 else lengths[1])
    layout, mask = NVTE_QKV_Layout.NVTE_Paged_KV_THD_BSHD_BSHD, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK
    bounds, data, pages = (sequences.cu_seqlens.data, cache.cu_lengths.data), (q.data, cache.k.data, cache.v.data), cache.page_table.data
    if options.beyond_nvidias(q.shape[1], bias is not None):
        draw = options.of_draw(seed)
        o, _ = tex.prim.attention(*data, bias_, *bounds, pages, *draw, *lengths, layout, mask, window, scale, *options.of_scores)
        return Tensor(o, q.type)
    o, *_ = tex.fused_attn_fwd(
        *lengths, False, scale, 0.0, True, layout, NVTE_QKV_Format.NVTE_THD, NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET, options.bias_type(bias), mask,
        NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, window, True, *bounds, *data, q.dtype, None, None, pages, pages, None, None, bias_, None, None, 0,
        False, False,
    )  # fmt: skip
    return Tensor(o, q.type)


def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    sequences: Sequences,
    scale: float,
    window_size: tuple[int, int] = EVERYWHERE,
    rotary: Rotary | None = None,
) -> Tensor:
    """``rope`` of q and k from where each sequence has come to, ``append_kv`` and ``attention_cached`` at once, with plain scores.

    ``q [tokens, heads, width]``, ``k, v [tokens, groups, width]``; the cache is used up.
    """
    angles = None if rotary is None else rope_angles(q, rotary, cache.capacity)
    starts, interleaved = (None, False) if rotary is None else (cache.starts.data, rotary.interleaved)
    o = tex.prim.attention_step(
        q.data, k.data, v.data, cache.k.data, cache.v.data, cache.page_table.data, sequences.cu_seqlens.data, cache.cu_lengths.data, angles, starts,
        interleaved, sequences.max_seqlen, window_edges(window_size, True), scale,
    )  # fmt: skip
    return Tensor(o, q.type)
