"""Scaled dot-product attention on lazy tensors: what is served, and how a problem's tokens are told apart.

A THD batch is one sequence of all its tokens under a block-diagonal mask, made in the program from the cumulative lengths. So one program serves
every batch of as many tokens and sequences, at the price of scores between all of its tokens.
"""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.errors import NotServedError, expected
from fusible.lazy import Tensor
from fusible.tex.attention_call import PADDING, Served, auxiliary, bounds, check_counts, side_inputs
from fusible.tex.attention_layout import Layout, format_name, gradient_layout
from fusible.tex.backends.xla import attention_math
from fusible.tex.backends.xla.attention_math import Gradients, Scores, Tokens
from fusible.tex.backends.xla.heads_first import from_heads_first, heads_first
from fusible.tex.backends.xla.segments import lengths, thd_segments
from fusible.tex.checks import check_probability
from fusible.tex.enums import NVTE_Bias_Type
from fusible.tex.interface.attention import Attention
from fusible.tex.interface.declare import Request, by_name, requires

__all__ = ["AttentionKernels"]

_SERVED = Served("xla", frozenset({lazy.float32, lazy.bfloat16, lazy.float16}))


def _refused(request: Request) -> str | None:
    return "serves attention without ALiBi" if request["bias_type"] == NVTE_Bias_Type.NVTE_ALIBI else None


class AttentionKernels(Attention):
    @requires(_refused)
    @by_name
    def fused_attn_fwd(self, call: Any) -> list[Any]:
        q, k, v = call.Q, call.K, call.V
        lay = _SERVED.check(call, (call.s_quantizer, call.o_quantizer))
        dropout = call.p_dropout if call.is_training else 0.0
        check_probability(dropout, "fused_attn_fwd")
        rng_state = _rng_state(dropout, call.rng_gen)
        queries, keys = _tokens(lay, call)
        scores = Scores.of(call, call.Bias, call.SoftmaxOffset, dropout, rng_state, queries=queries, keys=keys)
        o, stats, largest = attention_math.forward(scores, heads_first(q, lay.q), _keys(k, lay), _keys(v, lay))
        out = lazy.cast(from_heads_first(o, format_name(call.o_format, lay.q)), q.dtype)
        stats, largest = (from_heads_first(x, lay.statistics) for x in (stats, largest))
        return [out, stats, *([largest] if call.return_max_logit else []), rng_state, *side_inputs(call)]

    @requires(_refused)
    @by_name
    def fused_attn_bwd(self, call: Any) -> list[Any]:
        q, k, v = call.Q, call.K, call.V
        lay = _SERVED.check(call, (call.s_quantizer, call.dp_quantizer, call.dqkv_quantizer))
        to = gradient_layout(call.dqkv_layout, lay)
        check_probability(call.p_dropout, "fused_attn_bwd")
        stats, rng_state, bias, offset = auxiliary(call)
        queries, keys = _tokens(lay, call)
        scores = Scores.of(call, bias, offset, call.p_dropout, rng_state, queries=queries, keys=keys)
        o = heads_first(call.O, format_name(call.o_format, lay.q))
        do = heads_first(call.dO, format_name(call.do_format, lay.q))
        g = attention_math.backward(scores, heads_first(q, lay.q), _keys(k, lay), _keys(v, lay), o, do, heads_first(stats, lay.statistics))
        dq = lazy.cast(from_heads_first(g.q, to.q), q.dtype)
        dk, dv = (lazy.cast(_unkeys(d, x, lay, to), x.dtype) for d, x in ((g.k, k), (g.v, v)))
        extra = None if g.extra is None else lazy.sum(g.extra, (0, 2), keepdim=True)
        return [dq, dk, dv, _bias_gradient(scores, g), None if offset is None else extra]


def _rng_state(dropout: float, state: Any) -> Tensor:
    """``(seed, offset)``: a program cannot draw, so dropout takes the state itself in the generator's place."""
    if not dropout:
        return lazy.zeros((2,), lazy.int64)
    if not isinstance(state, Tensor) or state.shape != (2,) or state.dtype is not lazy.int64:
        raise NotServedError(
            expected("an int64 lazy tensor [2] as rng_gen", of="dropout in attention on lazy tensors", got=type(state).__name__, do="pass rng_state")
        )
    return state


def _keys(x: Tensor, lay: Layout) -> Tensor:
    """K or V as ``[n, g, t, d]``; beside THD queries, all tokens of all sequences in one batch."""
    x = heads_first(x, lay.kv)
    if lay.q != "THD" or lay.kv == "THD":
        return x
    b, g, s, d = x.shape
    return lazy.reshape(lazy.permute(x, (1, 0, 2, 3)), (1, g, b * s, d))


def _unkeys(x: Tensor, like: Tensor, lay: Layout, to: Layout) -> Tensor:
    """The inverse of ``_keys``, for a gradient of ``like`` in layout ``to``."""
    if lay.q == "THD" and lay.kv != "THD":
        b, g, s, d = heads_first(like, lay.kv).shape
        x = lazy.permute(lazy.reshape(x, (g, b, s, d)), (1, 0, 2, 3))
    return from_heads_first(x, to.kv)


def _tokens(lay: Layout, call: Any) -> tuple[Tokens, Tokens]:
    """The queries and the keys of a call."""
    cu_q, cu_kv = call.cu_seqlens_q, call.cu_seqlens_kv
    if cu_q is not None and cu_kv is not None:
        check_counts(cu_q.size - 1, cu_kv.size - 1)
    sides = []
    for side, name, x, cu, padded in (
        ("q", lay.q, call.Q, cu_q, call.cu_seqlens_q_padded),
        ("kv", lay.kv, call.K, cu_kv, call.cu_seqlens_kv_padded),
    ):
        column = side == "kv"
        if lay.q == "THD":
            sides.append(_apart(name, x, bounds(cu, side), padded, column))
        else:
            b, _, s, _ = heads_first(x, name).shape
            sizes = lengths(lazy.cast(bounds(cu, side), lazy.int32)) if int(call.attn_mask_type) in PADDING else None
            sides.append(_dense(b, s, sizes, column))
    return sides[0], sides[1]


def _apart(name: str, x: Tensor, cu: Tensor, padded: Tensor | None, column: bool) -> Tokens:
    """Sequences side by side: those of THD, or padded ones (of ``cu``'s lengths) laid out one after the other."""
    if name == "THD":
        tokens, starts = x.shape[0], padded
    else:
        b, _, s, _ = heads_first(x, name).shape
        tokens, starts = b * s, lazy.iota((b,), 0, lazy.int32) * s
    found = thd_segments(tokens, cu, starts)
    shape = (1, 1, 1, tokens) if column else (1, 1, tokens, 1)
    fields = (lazy.reshape(field, shape) for field in (found.sequence, found.position, found.length, found.inside))
    return Tokens(*fields, apart=True)


def _dense(b: int, s: int, sizes: Tensor | None, column: bool) -> Tokens:
    batch = lazy.reshape(lazy.iota((b,), 0, lazy.int32), (b, 1, 1, 1))
    position = lazy.reshape(lazy.iota((s,), 0, lazy.int32), (1, 1, 1, s) if column else (1, 1, s, 1))
    if sizes is None:
        return Tokens(batch, position, lazy.full((1, 1, 1, 1), s, lazy.int32), None, apart=False)
    size = lazy.reshape(sizes, (b, 1, 1, 1))
    return Tokens(batch, position, size, position < size, apart=False)


def _bias_gradient(sc: Scores, g: Gradients) -> Tensor | None:
    """The gradient of the scores summed to the bias's shape; 0 where the bias reaches beyond them."""
    if sc.bias is None:
        return None
    ds = g.scores * sc.scale if sc.pre_scale else g.scores
    dims = [d for d in range(4) if sc.bias.shape[d] == 1 and ds.shape[d] != 1]
    if dims:
        ds = lazy.sum(ds, dims, keepdim=True)
    missing = [(0, wanted - have) for wanted, have in zip(sc.bias.shape, ds.shape, strict=True)]
    if any(after for _, after in missing):
        ds = lazy.pad(ds, missing)
    return lazy.cast(ds, sc.bias.dtype)
