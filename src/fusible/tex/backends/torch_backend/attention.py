"""Scaled dot-product attention: what is served, and the walk over a problem's pieces."""

from __future__ import annotations

from typing import Any

import torch

from fusible.tex.attention_buffers import draw_rng_state, gradients, outputs
from fusible.tex.attention_call import Served, auxiliary, support_query
from fusible.tex.attention_layout import Layout, format_name, gradient_layout
from fusible.tex.backends.torch_backend import attention_math
from fusible.tex.backends.torch_backend.attention_math import Scores
from fusible.tex.backends.torch_backend.attention_pieces import operands, pieces, take
from fusible.tex.backends.torch_backend.kv_cache import gathered, put
from fusible.tex.checks import check_probability
from fusible.tex.interface.attention import Attention
from fusible.tex.interface.declare import by_name
from fusible.tex.protocol import to_torch

__all__ = ["AttentionKernels"]

_SERVED = Served("torch", frozenset({torch.float32, torch.bfloat16, torch.float16}), thd_bias=True, paged=True)


class AttentionKernels(Attention):
    def get_fused_attn_backend(self, *arguments: Any, **named: Any) -> Any:
        return support_query(_SERVED, to_torch, arguments, named)

    @by_name
    def fused_attn_fwd(self, call: Any) -> list[Any]:
        q, k, v = call.Q, call.K, call.V
        lay = _SERVED.check(call, (call.s_quantizer, call.o_quantizer))
        if lay.paged:
            lay, k, v = Layout(lay.q, "BSHD"), gathered(k, call.page_table_k, lay.kv), gathered(v, call.page_table_v, lay.kv)
            call.K, call.V = k, v
        dropout = call.p_dropout if call.is_training else 0.0
        check_probability(dropout, "fused_attn_fwd")
        rng_state = draw_rng_state(q.device, dropout, call.rng_gen)
        scores = Scores.of(call, call.Bias, call.SoftmaxOffset, dropout, rng_state)
        out_name = format_name(call.o_format, lay.q)
        out, stats, largest = outputs(lay, out_name, q, v)
        for piece in pieces(lay, call):
            if not piece.sq:
                continue
            o, row_stats, row_largest = attention_math.forward(scores, piece, *operands(lay, piece, q, k, v))
            take(out, out_name, piece, kv=False).copy_(o)
            take(stats, lay.statistics, piece, kv=False).copy_(row_stats)
            take(largest, lay.statistics, piece, kv=False).copy_(row_largest)
        side = [x for x in (scores.bias, scores.offset) if x is not None]
        return [out, stats, *([largest] if call.return_max_logit else []), rng_state, *side]

    @by_name
    def fused_attn_bwd(self, call: Any) -> list[Any]:
        q, k, v = call.Q, call.K, call.V
        lay = _SERVED.check(call, (call.s_quantizer, call.dp_quantizer, call.dqkv_quantizer))
        out_lay = gradient_layout(call.dqkv_layout, lay)
        check_probability(call.p_dropout, "fused_attn_bwd")
        stats, rng_state, bias, offset = auxiliary(call)
        scores = Scores.of(call, bias, offset, call.p_dropout, rng_state)
        o_name, do_name = format_name(call.o_format, lay.q), format_name(call.do_format, lay.q)
        dq, dk, dv = gradients(out_lay, q, k, v)
        dbias = None if bias is None else torch.zeros(bias.shape, device=bias.device)
        doffset = None if offset is None else torch.zeros(1, q.shape[lay.q.index("H")], 1, 1, device=q.device)
        for piece in pieces(lay, call):
            if not (piece.sq and piece.skv):
                continue
            rows = [take(x, name, piece, kv=False) for x, name in ((call.O, o_name), (call.dO, do_name), (stats, lay.statistics))]
            g = attention_math.backward(scores, piece, *operands(lay, piece, q, k, v), *rows)
            take(dq, lay.q, piece, kv=False).copy_(g.q)
            take(dk, lay.kv, piece, kv=True).copy_(g.k)
            take(dv, lay.kv, piece, kv=True).copy_(g.v)
            if dbias is not None:
                part = scores.bias_of(piece, dbias)
                part.add_(g.scores.sum_to_size(part.shape), alpha=call.attn_scale if scores.pre_scale else 1.0)
            if doffset is not None and g.extra is not None:
                doffset.add_(g.extra.sum((0, 2), keepdim=True))
        return [dq, dk, dv, None if dbias is None or bias is None else dbias.to(bias.dtype), doffset]

    @by_name
    def copy_to_kv_cache(self, call: Any) -> None:
        put(call, call.new_k, call.k_cache)
        put(call, call.new_v, call.v_cache)
