"""Samples of attention with dropout: queries and keys are zeros, so that all probabilities are equal, and values or gradients are ones.

The backend draws what it drops. The result counts the elements that it kept: these must be whole numbers, and about the right share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.table import Arguments, Disagreement, Output, Sample
from fusible.tex.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type

__all__ = ["BACKWARD", "CALL", "FORWARD", "drawn_backward", "drawn_forward"]

_UNSET, _BSHD = NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET, NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD

CALL: dict[str, Any] = {
    "attn_scale": 0.3, "p_dropout": 0.0, "set_zero": True, "qkv_layout": _BSHD, "o_format": _UNSET, "qkv_scale_inv_format": _UNSET,
    "bias_type": NVTE_Bias_Type.NVTE_NO_BIAS, "attn_mask_type": NVTE_Mask_Type.NVTE_NO_MASK, "window_size": [-1, -1],
    "softmax_type": NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, "bottom_right_diagonal": False, "cu_seqlens_q": None, "cu_seqlens_kv": None,
    "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None, "s_quantizer": None, "cuda_graph": False,
}  # fmt: skip
"""Arguments of the plainest call of both functions, without the lengths and the operands."""

FORWARD: dict[str, Any] = {
    "is_training": True, "page_table_k": None, "page_table_v": None, "o_quantizer": None, "Bias": None, "SoftmaxOffset": None, "rng_gen": None,
    "rng_elts_per_thread": 0, "return_max_logit": False,
}  # fmt: skip
"""Further arguments of ``fused_attn_fwd``."""

BACKWARD: dict[str, Any] = {
    "do_format": _UNSET, "dqkv_layout": _BSHD, "do_scale_inv_format": _UNSET, "deterministic": True, "dp_quantizer": None, "dqkv_quantizer": None,
}  # fmt: skip
"""Further arguments of ``fused_attn_bwd``, without O, dO and the tensors that the forward saved."""

_BATCH, _TOKENS, _HEADS, _WIDTH = 2, 32, 4, 8
_DROPPED = 0.25


def counted(place: int, dtype: torch.dtype) -> Output:
    """``kept / (tokens * (1 - p))`` in every column of a row, for some number of elements kept in the row."""

    def wanted(result: Any, arguments: Arguments) -> Tensor:
        unit = 1 / (_TOKENS * (1 - _DROPPED))
        kept = (result[place].cpu().double() / unit).round()
        share, draws = kept[..., 0].mean() / _TOKENS, kept[..., 0].numel() * _TOKENS
        varied = (kept[..., 0].std() ** 2 if share > 0 else 0) > 0.5 * _TOKENS * _DROPPED * (1 - _DROPPED)
        fair = varied and abs(share - (1 - _DROPPED)) < 6 * (_DROPPED * (1 - _DROPPED) / draws) ** 0.5  # within six standard deviations
        if not fair:
            raise Disagreement(f"a share of {share:.3g} is kept instead of {1 - _DROPPED}, or the same number of each line")
        return kept[..., :1].expand_as(kept) * unit

    # Probabilities may be rounded to the operands' type before they are multiplied.
    rounded = 0.5 * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps / (_TOKENS + 16)
    return Output(place, wanted, dtype, _TOKENS, 8.0 + 2 * rounded)


def call(dtype: torch.dtype, fill: Callable[..., Tensor]) -> dict[str, Any]:
    shape = (_BATCH, _TOKENS, _HEADS, _WIDTH)
    operands = {"Q": torch.zeros(shape, dtype=dtype), "K": torch.zeros(shape, dtype=dtype), "V": fill(shape, dtype=dtype), "fake_dtype": dtype}
    return {**CALL, "max_seqlen_q": _TOKENS, "max_seqlen_kv": _TOKENS, "p_dropout": _DROPPED, **operands}


def drawn_forward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of ``fused_attn_fwd`` with dropout: each line of a result counts the keys that were kept."""
    for source in (None, torch.Generator().manual_seed(5)):
        outputs = (counted(0, dtype), Output("result.2.shape", torch.Size([2])), Output("result.2.dtype", torch.int64))
        yield Sample(f"dropout, a generator {source is not None}", {**call(dtype, torch.ones), **FORWARD, "rng_gen": source}, outputs)


def drawn_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of ``fused_attn_bwd`` with dropout: each line of a result counts the keys that were kept."""
    arguments = {**call(dtype, torch.zeros), **BACKWARD}
    stats = torch.full((_BATCH, _HEADS, _TOKENS, 1), float(torch.tensor(_TOKENS).log()))
    nothing = torch.zeros_like(arguments["Q"])
    more = {"O": nothing.clone(), "dO": torch.ones_like(nothing), "Aux_CTX_Tensors": [stats, torch.tensor([1234, 0])]}
    yield Sample("dropout", {**arguments, **more}, (Output(0, nothing), Output(1, nothing.clone()), counted(2, dtype)))
