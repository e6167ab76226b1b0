"""Scaled dot-product attention: what is served, and the walk over a problem's pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusible.errors import NotServedError, expected
from fusible.tex.backends.torch_backend import attention_math
from fusible.tex.backends.torch_backend.attention_layout import format_name, gradients, layout, pieces, take
from fusible.tex.backends.torch_backend.attention_problem import auxiliary, check, draw_rng_state, make_scores, operands, outputs, refusal
from fusible.tex.backends.torch_backend.dropout import check_probability
from fusible.tex.enums import NVTE_Fused_Attn_Backend, NVTE_Mask_Type, NVTE_QKV_Layout
from fusible.tex.interface.attention import Attention
from fusible.tex.protocol import to_torch

__all__ = ["AttentionKernels"]

_PADDING = frozenset(
    {NVTE_Mask_Type.NVTE_PADDING_MASK, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK}
)
_QUERY_ARGUMENTS = (
    "is_training q_dtype kv_dtype qkv_layout bias_type attn_mask_type softmax_type p_dropout num_attn_heads num_gqa_groups max_seqlen_q "
    "max_seqlen_kv head_dim_qk head_dim_v window_size_left window_size_right return_max_logit cuda_graph deterministic"
).split()


class AttentionKernels(Attention):
    def get_fused_attn_backend(self, *arguments: Any, **named: Any) -> Any:
        given: Any = arguments[0] if arguments else named.get("fused_attn_params")
        if len(arguments) + len(named) == 1 and hasattr(given, "qkv_layout"):
            reason = refusal(given.qkv_layout, given.bias_type, to_torch(given.qkv_dtype))
            return _answer(reason), reason or ""
        values = dict(zip(_QUERY_ARGUMENTS, arguments, strict=False)) | named
        missing = [name for name in _QUERY_ARGUMENTS[:17] if name not in values]
        if missing or set(values) - set(_QUERY_ARGUMENTS):
            raise TypeError(expected("fused_attn_params, or 19 arguments", of="get_fused_attn_backend", got=sorted(values), do=f"pass {missing} too"))
        return _answer(refusal(values["qkv_layout"], values["bias_type"], to_torch(values["q_dtype"])))

    def fused_attn_fwd(
        self,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        is_training: bool,
        attn_scale: float,
        p_dropout: float,
        set_zero: bool,
        qkv_layout: Any,
        o_format: Any,
        qkv_scale_inv_format: Any,
        bias_type: Any,
        attn_mask_type: Any,
        softmax_type: Any,
        window_size: Sequence[int],
        bottom_right_diagonal: bool,
        cu_seqlens_q: Any,
        cu_seqlens_kv: Any,
        Q: Any,
        K: Any,
        V: Any,
        fake_dtype: Any,
        cu_seqlens_q_padded: Any,
        cu_seqlens_kv_padded: Any,
        page_table_k: Any,
        page_table_v: Any,
        s_quantizer: Any,
        o_quantizer: Any,
        Bias: Any,
        SoftmaxOffset: Any,
        rng_gen: Any,
        rng_elts_per_thread: int,
        return_max_logit: bool,
        cuda_graph: bool,
    ) -> list[Any]:
        lay = check(qkv_layout, bias_type, Q, K, V, (s_quantizer, o_quantizer), page_table_k)
        dropout = p_dropout if is_training else 0.0
        check_probability(dropout, "fused_attn_fwd")
        rng_state = draw_rng_state(Q.device, dropout, rng_gen)
        scores = make_scores(
            attn_scale, attn_mask_type, window_size, bottom_right_diagonal, bias_type, Bias, softmax_type, SoftmaxOffset, dropout, rng_state,
            max_seqlen_q, max_seqlen_kv, Q,
        )  # fmt: skip
        out_name = format_name(o_format, lay.q)
        out, stats, largest, stats_name = outputs(lay, out_name, Q, V)
        padding = int(attn_mask_type) in _PADDING
        for piece in pieces(lay, Q, K, padding, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded):
            if not piece.sq:
                continue
            o, row_stats, row_largest = attention_math.forward(scores, piece, *operands(lay, piece, Q, K, V))
            take(out, out_name, piece, kv=False).copy_(o)
            take(stats, stats_name, piece, kv=False).copy_(row_stats)
            take(largest, stats_name, piece, kv=False).copy_(row_largest)
        side = [x for x in (scores.bias, scores.offset) if x is not None]
        return [out, stats, *([largest] if return_max_logit else []), rng_state, *side]

    def fused_attn_bwd(
        self,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        attn_scale: float,
        p_dropout: float,
        set_zero: bool,
        qkv_layout: Any,
        o_format: Any,
        do_format: Any,
        dqkv_layout: Any,
        qkv_scale_inv_format: Any,
        do_scale_inv_format: Any,
        bias_type: Any,
        attn_mask_type: Any,
        softmax_type: Any,
        window_size: Sequence[int],
        bottom_right_diagonal: bool,
        deterministic: bool,
        cu_seqlens_q: Any,
        cu_seqlens_kv: Any,
        Q: Any,
        K: Any,
        V: Any,
        O: Any,  # noqa: E741
        dO: Any,
        fake_dtype: Any,
        Aux_CTX_Tensors: Sequence[Any],
        cu_seqlens_q_padded: Any,
        cu_seqlens_kv_padded: Any,
        s_quantizer: Any,
        dp_quantizer: Any,
        dqkv_quantizer: Any,
        cuda_graph: bool,
    ) -> list[Any]:
        lay = check(qkv_layout, bias_type, Q, K, V, (s_quantizer, dp_quantizer, dqkv_quantizer), None)
        out_lay = layout(dqkv_layout)
        if out_lay is None or (out_lay.q, out_lay.kv) != (lay.q, lay.kv):
            got = NVTE_QKV_Layout(int(dqkv_layout)).name
            raise NotServedError(expected("the dimension order of qkv_layout", of="dqkv_layout", got=got, do="pass qkv_layout, or its packed form"))
        check_probability(p_dropout, "fused_attn_bwd")
        stats, rng_state, bias, offset = auxiliary(Aux_CTX_Tensors, bias_type, softmax_type)
        scores = make_scores(
            attn_scale, attn_mask_type, window_size, bottom_right_diagonal, bias_type, bias, softmax_type, offset, p_dropout, rng_state,
            max_seqlen_q, max_seqlen_kv, Q,
        )  # fmt: skip
        o_name, do_name = format_name(o_format, lay.q), format_name(do_format, lay.q)
        stats_name = "THD" if lay.q == "THD" else "BHSD"
        dq, dk, dv = gradients(out_lay, Q, K, V)
        dbias = None if bias is None else torch.zeros(bias.shape, device=bias.device)
        doffset = None if offset is None else torch.zeros(1, Q.shape[lay.q.index("H")], 1, 1, device=Q.device)
        padding = int(attn_mask_type) in _PADDING
        for piece in pieces(lay, Q, K, padding, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded):
            if not (piece.sq and piece.skv):
                continue
            rows = [take(x, name, piece, kv=False) for x, name in ((O, o_name), (dO, do_name), (stats, stats_name))]
            g = attention_math.backward(scores, piece, *operands(lay, piece, Q, K, V), *rows)
            take(dq, lay.q, piece, kv=False).copy_(g.q)
            take(dk, lay.kv, piece, kv=True).copy_(g.k)
            take(dv, lay.kv, piece, kv=True).copy_(g.v)
            if dbias is not None:
                part = scores.bias_of(piece, dbias)
                part.add_(g.scores.sum_to_size(part.shape), alpha=attn_scale if scores.pre_scale else 1.0)
            if doffset is not None and g.extra is not None:
                doffset.add_(g.extra.sum((0, 2), keepdim=True))
        return [dq, dk, dv, None if dbias is None or bias is None else dbias.to(bias.dtype), doffset]


def _answer(reason: str | None) -> NVTE_Fused_Attn_Backend:
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend if reason else NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
