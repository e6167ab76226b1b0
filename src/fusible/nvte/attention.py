"""Words for attention over a batch of sequences, and for rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusible import tex
from fusible.nvte.dtype import DType
from fusible.nvte.elementwise import reshape
from fusible.nvte.execution import current_pass
from fusible.nvte.tensor import Tensor
from fusible.tex import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type

__all__ = ["AttentionAux", "EVERYWHERE", "Sequences", "attention", "dattention", "drope", "rope", "window_edges"]

EVERYWHERE = (-1, -1)
"""A window without edges."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """How the tokens of a batch ``[tokens, ...]`` divide into sequences that lie one after another.

    ``cu_seqlens``: int32 ``[count + 1]``, where each begins and the last ends. ``uniform``: all are ``max_seqlen`` long;
    otherwise none is longer.
    """

    cu_seqlens: Tensor
    count: int
    max_seqlen: int
    uniform: bool

    @property
    def format(self) -> NVTE_QKV_Format:
        return NVTE_QKV_Format.NVTE_BSHD if self.uniform else NVTE_QKV_Format.NVTE_THD

    def fold(self, x: Tensor) -> Tensor:
        """``[tokens, heads, width]`` as the layout's own shape: ``[count, max_seqlen, heads, width]`` where uniform."""
        return reshape(x, (self.count, self.max_seqlen, *x.shape[1:])) if self.uniform else x

    def unfold(self, x: Tensor) -> Tensor:
        """The inverse of ``fold``."""
        return reshape(x, (self.count * self.max_seqlen, *x.shape[2:])) if self.uniform else x


@dataclass(frozen=True)
class AttentionAux:
    """What the backward of attention needs beside q, k, v and o: ``stats`` (log-sum-exp, fp32) and ``rng_state`` (int64 ``[2]``)."""

    stats: Tensor
    rng_state: Tensor


def rope(x: Tensor, sequences: Sequences, base: float, starts: Tensor | None = None, end: int = 0) -> Tensor:
    """Rotate the heads ``[tokens, heads, width]`` by the angles of their positions, which restart in each sequence (arXiv:2104.09864).

    ``starts``: int32 ``[count]``, the positions of the sequences' first tokens, where they are not 0; then all positions are below ``end``.
    """
    return _rope(tex.fused_rope_forward, x, sequences, base, starts, end)


def drope(dy: Tensor, sequences: Sequences, base: float) -> Tensor:
    """The gradient of ``rope``: the rotation back."""
    return _rope(tex.fused_rope_backward, dy, sequences, base)


def _rope(rotate: Any, x: Tensor, sequences: Sequences, base: float, starts: Tensor | None = None, end: int = 0) -> Tensor:
    angles = _angles(max(end, sequences.max_seqlen), x.shape[-1], base, x)
    cu_seqlens = None if sequences.uniform else sequences.cu_seqlens.data
    folded = sequences.fold(x)
    first = starts.data if starts is not None else None
    return sequences.unfold(Tensor(rotate(folded.data, angles, first, sequences.format, False, cu_seqlens, 1, 0), x.type))


def _angles(positions: int, width: int, base: float, like: Tensor) -> Any:
    """The angles, once in a pass: every layer rotates by the same."""
    memo, key = current_pass().memo, ("rope angles", positions, width, base)
    if memo is not None and key in memo:
        return memo[key]
    angles = tex.prim.rope_angles(positions, width, base, like.data)
    if memo is not None:
        memo[key] = angles
    return angles


def attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, causal: bool, is_training: bool, window_size: tuple[int, int] = EVERYWHERE
) -> tuple[Tensor, AttentionAux]:
    """``softmax(scale * q k^T) v`` within each sequence: ``q [tokens, heads, width]``, ``k, v [tokens, groups, width]``.

    Several query heads share a group of k and v (grouped-query attention). ``window_size``: how many tokens before and after its own place a query
    sees, -1 for all. Gives ``o`` shaped like ``q``, and what backward needs.
    """
    cu, length = sequences.cu_seqlens.data, sequences.max_seqlen
    layout, format_ = _layout(sequences)
    q_, k_, v_ = (sequences.fold(t).data for t in (q, k, v))
    o, stats, rng_state, *_ = tex.fused_attn_fwd(
        length, length, is_training, scale, 0.0, True, layout, format_, NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET,
        NVTE_Bias_Type.NVTE_NO_BIAS, _mask(sequences, causal), NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, window_edges(window_size, causal), False,
        cu, cu, q_, k_, v_, q.dtype, None, None, None, None, None, None, None, None, None, 0, False, False,
    )  # fmt: skip
    return sequences.unfold(Tensor(o, q.type)), AttentionAux(Tensor(stats, DType.Float32), Tensor(rng_state, DType.Int64))


def dattention(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    aux: AttentionAux,
    sequences: Sequences,
    scale: float,
    causal: bool,
    window_size: tuple[int, int] = EVERYWHERE,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` of ``attention``."""
    cu, length = sequences.cu_seqlens.data, sequences.max_seqlen
    layout, format_ = _layout(sequences)
    not_set = NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET
    q_, k_, v_, o_, do_ = (sequences.fold(t).data for t in (q, k, v, o, do))
    dq, dk, dv, *_ = tex.fused_attn_bwd(
        length, length, scale, 0.0, True, layout, format_, format_, layout, not_set, not_set,
        NVTE_Bias_Type.NVTE_NO_BIAS, _mask(sequences, causal), NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, window_edges(window_size, causal), False, True,
        cu, cu, q_, k_, v_, o_, do_, q.dtype, [aux.stats.data, aux.rng_state.data],
        None, None, None, None, None, False,
    )  # fmt: skip
    return sequences.unfold(Tensor(dq, q.type)), sequences.unfold(Tensor(dk, k.type)), sequences.unfold(Tensor(dv, v.type))


def window_edges(window_size: tuple[int, int], causal: bool) -> list[int]:
    """As the interface takes them: a causal query sees nothing after its own place."""
    left, right = window_size
    return [left, 0 if causal and left >= 0 else right]


def _layout(sequences: Sequences) -> tuple[NVTE_QKV_Layout, NVTE_QKV_Format]:
    layout = NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD if sequences.uniform else NVTE_QKV_Layout.NVTE_THD_THD_THD
    return layout, sequences.format


def _mask(sequences: Sequences, causal: bool) -> NVTE_Mask_Type:
    """Sequences of unequal length are told apart by padding masks, as the interface has it for THD."""
    if sequences.uniform:
        return NVTE_Mask_Type.NVTE_CAUSAL_MASK if causal else NVTE_Mask_Type.NVTE_NO_MASK
    return NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK if causal else NVTE_Mask_Type.NVTE_PADDING_MASK
