"""Attention by FlagGems' kernels: whole sequences of equal lengths, causal or not. What no kind of an argument shows is handed over."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.flaggems.operands import refused
from fusible.tex.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type
from fusible.tex.interface.attention import Attention
from fusible.tex.interface.declare import CallArguments, Request, by_name, requires
from fusible.tex.selection.dispatch import hand_over

__all__ = ["AttentionKernels"]

_HALF = frozenset({torch.bfloat16, torch.float16})
_WIDTHS = frozenset({16, 32, 64, 128, 256})
_LN2 = math.log(2)
_HEADS_FIRST = {"SBHD": (1, 2, 0, 3), "BSHD": (0, 2, 1, 3), "BHSD": (0, 1, 2, 3)}
"""How the dimensions of a format are permuted to ``[b, h, s, d]``."""

_LAYOUTS = {NVTE_QKV_Layout[f"NVTE_{name}_{name}_{name}"]: name for name in _HEADS_FIRST}
_FORMATS = {NVTE_QKV_Format[f"NVTE_{name}"]: name for name in _HEADS_FIRST}


def _refused(request: Request) -> str | None:
    layout: Any = request["qkv_layout"]
    if layout not in _LAYOUTS:
        return "reads Q, K and V apart, in SBHD, BSHD or BHSD"
    if request["bias_type"] != NVTE_Bias_Type.NVTE_NO_BIAS or request["softmax_type"] != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX:
        return "serves the plain softmax without a bias"
    if request["attn_mask_type"] not in (NVTE_Mask_Type.NVTE_NO_MASK, NVTE_Mask_Type.NVTE_CAUSAL_MASK):
        return "serves no mask and the causal mask"
    return refused(request, _HALF)


def _heads_first(x: Tensor, name: str) -> Tensor:
    return x.permute(_HEADS_FIRST[name])


def _put(x: Tensor, name: str) -> Tensor:
    """``[b, h, s, d]`` in the memory of a format."""
    order = _HEADS_FIRST[name]
    return x.permute([order.index(i) for i in range(4)]).contiguous()


def _served(call: CallArguments, dropout: float) -> bool:
    """Whether FlagGems computes this call: equal lengths and widths, all keys in reach, nothing dropped."""
    causal = call.attn_mask_type == NVTE_Mask_Type.NVTE_CAUSAL_MASK
    left, right = call.window_size
    widths = {call.Q.shape[-1], call.K.shape[-1], call.V.shape[-1]}
    reach = left == -1 and (right == -1 or (causal and right == 0 and not call.bottom_right_diagonal))
    return reach and not dropout and call.max_seqlen_q == call.max_seqlen_kv and len(widths) == 1 and widths <= _WIDTHS


def _name(asked: Any, layout: Any) -> str:
    return _FORMATS.get(asked, _LAYOUTS[layout])


class AttentionKernels(Attention):
    gems: Any

    @requires(_refused)
    @by_name
    def fused_attn_fwd(self, call: CallArguments) -> list[Any]:
        unlike = call.page_table_k is not None or call.page_table_v is not None or call.return_max_logit
        if unlike or not _served(call, call.p_dropout if call.is_training else 0.0):
            return hand_over(self, "fused_attn_fwd", **vars(call))  # type: ignore[arg-type]
        name = _LAYOUTS[call.qkv_layout]
        q, k, v = (_heads_first(x, name) for x in (call.Q, call.K, call.V))
        causal = call.attn_mask_type == NVTE_Mask_Type.NVTE_CAUSAL_MASK
        o, log2 = self.gems.scaled_dot_product_attention_forward(
            q, k, v, attn_mask=None, dropout_p=0.0, is_causal=causal, scale=call.attn_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        # FlagGems keeps the logarithm of the denominator to the base 2.
        stats = log2.float().mul(_LN2).unsqueeze(-1)
        return [_put(o, _name(call.o_format, call.qkv_layout)), stats, torch.zeros(2, dtype=torch.int64, device=q.device)]

    @requires(_refused)
    @by_name
    def fused_attn_bwd(self, call: CallArguments) -> list[Any]:
        if not _served(call, call.p_dropout) or call.dqkv_layout not in _LAYOUTS:
            return hand_over(self, "fused_attn_bwd", **vars(call))  # type: ignore[arg-type]
        name = _LAYOUTS[call.qkv_layout]
        q, k, v = (_heads_first(x, name) for x in (call.Q, call.K, call.V))
        o = _heads_first(call.O, _name(call.o_format, call.qkv_layout))
        do = _heads_first(call.dO, _name(call.do_format, call.qkv_layout))
        log2 = call.Aux_CTX_Tensors[0].squeeze(-1) / _LN2
        causal = call.attn_mask_type == NVTE_Mask_Type.NVTE_CAUSAL_MASK
        gradients = self.gems.scaled_dot_product_attention_backward(
            do, q, k, v, o, log2, attn_mask=None, dropout_p=0.0, is_causal=causal, scale=call.attn_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return [*(_put(x, _LAYOUTS[call.dqkv_layout]) for x in gradients), None, None]
