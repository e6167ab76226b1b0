"""Scaled dot-product attention: what is served, and the walk over a problem's pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.attention_buffers import draw_rng_state, gradients, outputs
from fusible.tex.attention_call import Served, auxiliary, side_inputs
from fusible.tex.attention_layout import Layout, format_name, gradient_layout, layout
from fusible.tex.attention_query import support_query
from fusible.tex.backends.torch_backend import attention_math, kv_cache
from fusible.tex.backends.torch_backend.attention_fp8 import (
    Amax,
    quantized_gradients,
    quantizes,
    read,
    refused_formats,
    result_dtype,
    without_gradient,
)
from fusible.tex.backends.torch_backend.attention_math import Scores
from fusible.tex.backends.torch_backend.attention_pieces import Piece, batches, keys_and_values, pieces, row_blocks, take
from fusible.tex.backends.torch_backend.quantize import emit
from fusible.tex.backends.torch_backend.token_layouts import TokenLayoutKernels
from fusible.tex.checks import check_probability
from fusible.tex.interface.declare import by_name, requires
from fusible.tex.kv_cache_call import check_cache_call
from fusible.tex.protocol import to_torch

__all__ = ["AttentionKernels"]

_SERVED = Served("torch", frozenset({torch.float32, torch.bfloat16, torch.float16}), thd_bias=True, paged=True, alibi=True, fp8=True)


class AttentionKernels(TokenLayoutKernels):
    def get_fused_attn_backend(self, *arguments: Any, **named: Any) -> Any:
        return support_query(_SERVED, to_torch, arguments, named)

    @requires(refused_formats)
    @by_name
    def fused_attn_fwd(self, call: Any) -> list[Any]:
        dtype, quantized = result_dtype(call.Q, call.fake_dtype), quantizes(call.o_quantizer)
        given = _layout(call)
        read(call, Q=given.q, K=given.kv, V=given.kv)
        lay = _SERVED.check(call)
        dropout = call.p_dropout if call.is_training else 0.0
        check_probability(dropout, "fused_attn_fwd")
        rng_state = draw_rng_state(call.Q.device, dropout, call.rng_gen)
        scores = Scores.of(call, call.Bias, call.SoftmaxOffset, dropout, rng_state)
        name, seen = format_name(call.o_format, lay.q), Amax(call.s_quantizer)
        out, stats, largest = outputs(lay, name, call.Q, call.V, dtype=torch.float32 if quantized else dtype)
        # Dropout's words are 64-bit, and several at once: a mask takes four times what its scores do.
        share = 16 if dropout else 4
        for piece in pieces(lay, call):
            for batch, rows in batches(piece, call, lay, share):
                k, v = keys_and_values(lay, call, batch)
                for block in row_blocks(batch, rows):
                    results = attention_math.forward(scores, block, take(call.Q, lay.q, block, kv=False), k, v, seen)
                    for x, form, result in zip((out, stats, largest), (name, lay.statistics, lay.statistics), results, strict=True):
                        take(x, form, block, kv=False).copy_(result)
        seen.record()
        o = emit(out, call.o_quantizer, dtype) if quantized else out
        return [o, stats, *([largest] if call.return_max_logit else []), rng_state, *side_inputs(call)]

    @requires(refused_formats)
    @by_name
    def fused_attn_bwd(self, call: Any) -> list[Any]:
        dtypes = [result_dtype(x, call.fake_dtype) for x in (call.Q, call.K, call.V)]
        quantized = quantizes(call.dqkv_quantizer)
        given = _layout(call)
        without_gradient(call)
        o, do = (format_name(form, given.q) for form in (call.o_format, call.do_format))
        read(call, Q=given.q, K=given.kv, V=given.kv, O=o, dO=do)
        lay = _SERVED.check(call)
        to = gradient_layout(call.dqkv_layout, lay)
        check_probability(call.p_dropout, "fused_attn_bwd")
        _, rng_state, bias, offset = auxiliary(call)
        walk = _Backward(call, lay, to, Scores.of(call, bias, offset, call.p_dropout, rng_state), offset)
        stored = [torch.float32] * 3 if quantized else dtypes
        walk.grads = gradients(to, lay, call.Q, call.K, call.V, (stored[0], stored[1], stored[2]))
        for piece in pieces(lay, call):
            if piece.sq and piece.skv:
                walk.piece(piece, 16 if call.p_dropout else 4)
        walk.seen.record()
        dqkv = quantized_gradients(walk.grads, to, call.dqkv_quantizer, dtypes[0]) if quantized else walk.grads
        dbias = walk.dbias
        return [*dqkv, None if dbias is None or bias is None else dbias.to(bias.dtype), walk.doffset]

    @by_name
    def copy_to_kv_cache(self, call: Any) -> None:
        check_cache_call(call)
        kv_cache.put(call)


def _layout(call: Any) -> Layout:
    """The layout of a call, of which it is not known yet whether it is served."""
    return layout(call.qkv_layout) or Layout("", "")


class _Backward:
    """The gradients of a call, filled piece by piece."""

    grads: tuple[Tensor, Tensor, Tensor]

    def __init__(self, call: Any, lay: Layout, to: Layout, scores: Scores, offset: Tensor | None) -> None:
        self.call, self.lay, self.to, self.scores = call, lay, to, scores
        self.rows = (
            (call.O, format_name(call.o_format, lay.q)),
            (call.dO, format_name(call.do_format, lay.q)),
            (auxiliary(call)[0], lay.statistics),
        )
        self.seen = Amax(call.dp_quantizer)
        device, heads = call.Q.device, call.Q.shape[lay.q.index("H")]
        self.dbias = None if scores.bias is None else torch.zeros(scores.bias.shape, dtype=torch.float32, device=device)
        self.doffset = None if offset is None else torch.zeros(1, heads, 1, 1, dtype=torch.float32, device=device)

    def piece(self, piece: Piece, share: int) -> None:
        for batch, rows in batches(piece, self.call, self.lay, share):
            k, v = keys_and_values(self.lay, self.call, batch)
            dk, dv = (take(x, self.to.kv, batch, kv=True) for x in self.grads[1:])
            sums: tuple[Tensor, Tensor] | None = None
            for block in row_blocks(batch, rows):
                g = self.block(block, k, v)
                sums = (g.k, g.v) if sums is None else (sums[0].add_(g.k), sums[1].add_(g.v))
            if sums is not None:
                dk.copy_(sums[0])
                dv.copy_(sums[1])

    def block(self, block: Piece, k: Tensor, v: Tensor) -> attention_math.Gradients:
        """The gradients of one block of queries; those of Q, the bias and the offset are put where they belong."""
        sc = self.scores
        q = take(self.call.Q, self.lay.q, block, kv=False)
        o, do, stats = (take(x, name, block, kv=False) for x, name in self.rows)
        g = attention_math.backward(sc, block, (q, k, v), o, do, stats, self.seen)
        take(self.grads[0], self.to.q, block, kv=False).copy_(g.q)
        if self.dbias is not None:
            part = sc.bias_of(block, self.dbias)
            part.add_(g.scores.sum_to_size(part.shape), alpha=sc.scale if sc.pre_scale else 1.0)
        if self.doffset is not None and g.extra is not None:
            self.doffset.add_(g.extra.sum((0, 2), keepdim=True))
        return g
