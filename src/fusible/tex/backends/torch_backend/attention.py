"""Scaled dot-product attention: what is served."""

from __future__ import annotations

from typing import Any

import torch

from fusible.tex.backends.torch_backend import kv_cache
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
from fusible.tex.backends.torch_backend.attention_walk import Backward, attended
from fusible.tex.backends.torch_backend.quantizing import emit
from fusible.tex.backends.torch_backend.token_layouts import TokenLayoutKernels
from fusible.tex.calls.attention import Served, auxiliary, beyond_nvidias, check_stats, side_inputs
from fusible.tex.calls.attention_buffers import draw_rng_state, seeded
from fusible.tex.calls.attention_layout import Layout, format_name, gradient_layout, layout
from fusible.tex.calls.attention_query import support_query
from fusible.tex.calls.checks import check_probability
from fusible.tex.calls.kv_cache import check_cache_call
from fusible.tex.interface.declare import by_name, requires
from fusible.tex.protocol import to_torch

__all__ = ["AttentionKernels"]

_SERVED = Served("torch", frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}), paged=True, alibi=True, fp8=True)


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
        seen = Amax(call.s_quantizer)
        out, stats, largest = attended(call, lay, scores, seen, torch.float32 if quantized else dtype)
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
        stats, rng_state, bias, offset = auxiliary(call)
        scores, seen = Scores.of(call, bias, offset, call.p_dropout, rng_state), Amax(call.dp_quantizer)
        walk = Backward(call, (lay, to), scores, stats, offset, [torch.float32] * 3 if quantized else dtypes, seen)
        seen.record()
        dqkv = quantized_gradients(walk.grads, to, call.dqkv_quantizer, dtypes[0]) if quantized else walk.grads
        return [*dqkv, walk.bias_gradient, walk.doffset]

    @by_name
    def prim_attention(self, call: Any) -> tuple[Any, Any]:
        check_probability(call.probability, "prim.attention")
        call = beyond_nvidias(call, seeded)
        lay = _SERVED.check(call)
        scores = Scores.of(call, call.Bias, None, call.p_dropout, call.rng_state)
        return attended(call, lay, scores, Amax(None), call.Q.dtype)[:2]

    @by_name
    def prim_attention_backward(self, call: Any) -> tuple[Any, Any, Any, Any]:
        check_probability(call.probability, "prim.attention_backward")
        call = beyond_nvidias(call, seeded)
        lay, dtypes = _SERVED.check(call), [x.dtype for x in (call.Q, call.K, call.V)]
        check_stats(call.stats, call)
        scores = Scores.of(call, call.Bias, None, call.p_dropout, call.rng_state)
        walk = Backward(call, (lay, lay), scores, call.stats, None, dtypes, Amax(None))
        return (*walk.grads, walk.bias_gradient)

    @by_name
    def copy_to_kv_cache(self, call: Any) -> None:
        check_cache_call(call)
        kv_cache.put(call)


def _layout(call: Any) -> Layout:
    """The layout of a call, of which it is not known yet whether it is served."""
    return layout(call.qkv_layout) or Layout("", "")
