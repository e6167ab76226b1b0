"""Scaled dot-product attention: what is served, and the walk over a problem's pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.errors import expected
from fusible.tex.attention_call import Served, auxiliary
from fusible.tex.attention_layout import format_name, gradient_layout
from fusible.tex.backends.torch_backend import attention_math
from fusible.tex.backends.torch_backend.attention_math import Scores
from fusible.tex.backends.torch_backend.attention_pieces import gradients, operands, outputs, pieces, take
from fusible.tex.checks import check_probability
from fusible.tex.enums import NVTE_Fused_Attn_Backend
from fusible.tex.interface.attention import Attention
from fusible.tex.interface.declare import by_name
from fusible.tex.protocol import to_torch

__all__ = ["AttentionKernels"]

_SERVED = Served("torch", frozenset({torch.float32, torch.bfloat16, torch.float16}), thd_bias=True)
_QUERY_ARGUMENTS = (
    "is_training q_dtype kv_dtype qkv_layout bias_type attn_mask_type softmax_type p_dropout num_attn_heads num_gqa_groups max_seqlen_q "
    "max_seqlen_kv head_dim_qk head_dim_v window_size_left window_size_right return_max_logit cuda_graph deterministic"
).split()


class AttentionKernels(Attention):
    def get_fused_attn_backend(self, *arguments: Any, **named: Any) -> Any:
        given: Any = arguments[0] if arguments else named.get("fused_attn_params")
        if len(arguments) + len(named) == 1 and hasattr(given, "qkv_layout"):
            reason = _SERVED.refusal(given.qkv_layout, given.bias_type, to_torch(given.qkv_dtype))
            return _answer(reason), reason or ""
        values = dict(zip(_QUERY_ARGUMENTS, arguments, strict=False)) | named
        missing = [name for name in _QUERY_ARGUMENTS[:17] if name not in values]
        if missing or set(values) - set(_QUERY_ARGUMENTS):
            raise TypeError(expected("fused_attn_params, or 19 arguments", of="get_fused_attn_backend", got=sorted(values), do=f"pass {missing} too"))
        return _answer(_SERVED.refusal(values["qkv_layout"], values["bias_type"], to_torch(values["q_dtype"])))

    @by_name
    def fused_attn_fwd(self, call: Any) -> list[Any]:
        q, k, v = call.Q, call.K, call.V
        lay = _SERVED.check(call, (call.s_quantizer, call.o_quantizer), call.page_table_k)
        dropout = call.p_dropout if call.is_training else 0.0
        check_probability(dropout, "fused_attn_fwd")
        rng_state = _draw_rng_state(q.device, dropout, call.rng_gen)
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


def _answer(reason: str | None) -> NVTE_Fused_Attn_Backend:
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend if reason else NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen


def _draw_rng_state(device: torch.device, dropout: float, generator: torch.Generator | None) -> Tensor:
    """``(seed, offset)``; drawn only where dropout needs it."""
    if not dropout:
        return torch.zeros(2, dtype=torch.int64, device=device)
    source = device if generator is None else generator.device
    seed = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, generator=generator, device=source)
    return torch.cat((seed, torch.zeros_like(seed))).to(device)
