"""Attention on torch tensors, forward and backward by ``fusible.tex``; an ``Attention`` describes all of a call but its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusible import tex
from fusible.pytorch.engine.torch_autocast import without_torch_autocast
from fusible.tex import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type

__all__ = ["Attention", "BIASES", "FORMATS", "Lengths", "MASKS", "SOFTMAXES", "attend"]

# NVIDIA's enumerations name a member as its modules name the option, in capitals.
FORMATS = {name: NVTE_QKV_Format[f"NVTE_{name.upper()}"] for name in ("sbhd", "bshd", "thd")}
"""The layouts in which queries, keys and values come, by NVIDIA's names."""
MASKS = {
    "no_mask": NVTE_Mask_Type.NVTE_NO_MASK,
    **{
        name: NVTE_Mask_Type[f"NVTE_{name.upper()}_MASK"]
        for name in ("padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
    },
    "arbitrary": NVTE_Mask_Type.NVTE_NO_MASK,  # a bias keeps what it excludes out
}
BIASES = {name: NVTE_Bias_Type[f"NVTE_{name.upper()}"] for name in ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")}
SOFTMAXES = {name: NVTE_Softmax_Type[f"NVTE_{name.upper().replace('-', '_')}_SOFTMAX"] for name in ("vanilla", "off-by-one", "learnable")}
_NOT_SET = NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET


@dataclass(frozen=True)
class Attention:
    """``softmax(scale * q k^T + bias) v`` by the names that NVIDIA's modules give the options: ``format`` of q, k, v and of what comes out
    (``"sbhd"``, ``"bshd"``, ``"thd"``), ``mask``, ``window`` (keys before and behind a query's own place, -1 for all), ``bias``, ``softmax``.
    ``cached``: k and v are those of a cache, ``[b, s, h, d]`` or pages, and what comes out has no backward."""

    format: str
    mask: str
    window: tuple[int, int]
    bottom_right: bool
    bias: str
    softmax: str
    scale: float
    dropout: float
    max_seqlen_q: int
    max_seqlen_kv: int
    cached: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, offset: Tensor | None, lengths: Lengths, training: bool) -> list[Any]:
        """``[o, what backward takes...]``."""
        layout, format_ = self._layout(lengths.pages), FORMATS[self.format]
        return tex.fused_attn_fwd(
            self.max_seqlen_q, self.max_seqlen_kv, training, self.scale, self.dropout, True, layout, format_, _NOT_SET, BIASES[self.bias],
            MASKS[self.mask], SOFTMAXES[self.softmax], list(self.window), self.bottom_right, lengths.q, lengths.kv, q, k, v, q.dtype,
            lengths.q_padded, lengths.kv_padded, lengths.pages, lengths.pages, None, None, bias, offset, None, 0, False, False,
        )  # fmt: skip

    def _layout(self, pages: Tensor | None) -> NVTE_QKV_Layout:
        """The layout of q, k and v. Keys and values of a cache lie batch first, whatever the layout of the queries."""
        own = self.format.upper()
        if self.cached:
            return NVTE_QKV_Layout[f"NVTE_{'Paged_KV_' if pages is not None else ''}{own}_BSHD_BSHD"]
        return NVTE_QKV_Layout[f"NVTE_{own}_{own}_{own}"]

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, aux: list[Tensor], lengths: Lengths) -> list[Any]:
        """``[dq, dk, dv, dbias, doffset]``."""
        layout, format_ = self._layout(None), FORMATS[self.format]
        return tex.fused_attn_bwd(
            self.max_seqlen_q, self.max_seqlen_kv, self.scale, self.dropout, True, layout, format_, format_, layout, _NOT_SET, _NOT_SET,
            BIASES[self.bias], MASKS[self.mask], SOFTMAXES[self.softmax], list(self.window), self.bottom_right, True, lengths.q, lengths.kv,
            q, k, v, o, do, q.dtype, aux, lengths.q_padded, lengths.kv_padded, None, None, None, False,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Lengths:
    """Cumulative lengths of the sequences of queries, and of keys and values: int32 ``[sequences + 1]``. ``..._padded``: the same with the padding
    between sequences, where there is some. ``pages``: the page table, int32 ``[sequences, pages of one]``, where keys and values lie in pages."""

    q: Tensor
    kv: Tensor
    q_padded: Tensor | None = None
    kv_padded: Tensor | None = None
    pages: Tensor | None = None


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Attention, lengths: Lengths, q: Any, k: Any, v: Any, bias: Any, offset: Any) -> Tensor:
        o, *aux = call.forward(q, k, v, bias, offset, lengths, True)
        ctx.save_for_backward(q, k, v, o, *aux)
        ctx.call, ctx.lengths = call, lengths
        return o

    @staticmethod
    def backward(ctx: Any, *dos: Any) -> Any:
        q, k, v, o, *aux = ctx.saved_tensors
        with without_torch_autocast(q.device.type):
            dq, dk, dv, dbias, doffset = ctx.call.backward(dos[0].contiguous(), q, k, v, o, aux, ctx.lengths)
        wants_bias, wants_offset = ctx.needs_input_grad[5:]
        return None, None, dq, dk, dv, dbias if wants_bias else None, doffset if wants_offset else None


def attend(call: Attention, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, offset: Tensor | None, lengths: Lengths) -> Tensor:
    """``o`` of a problem: q's tokens and heads, v's head width. ``offset``: of the softmax, fp32 ``[1, heads, 1, 1]``."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    with without_torch_autocast(q.device.type):
        if not call.cached and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, bias, offset)):
            return _Function.apply(call, lengths, q, k, v, bias, offset)  # type: ignore[no-any-return]
        with torch.no_grad():
            return call.forward(q, k, v, bias, offset, lengths, call.dropout > 0)[0]  # dropout needs no gradient
