"""Scaled dot-product attention on lazy tensors: what is served, and how a problem's tokens are told apart.

A THD batch is one sequence of all its tokens under a block-diagonal mask, made in the program from the cumulative lengths. So one program serves
every batch of as many tokens and sequences, at the price of scores between all of its tokens. Over a paged cache, where a step has few queries and
all keys that there can be, each sequence has scores of its own instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusible import lazy
from fusible.errors import NotServedError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla import attention_bias, attention_math, kv_cache, native_attention
from fusible.tex.backends.xla.attention_math import Scores
from fusible.tex.backends.xla.heads_first import from_heads_first, heads_first
from fusible.tex.backends.xla.segments import lengths, thd_segments
from fusible.tex.backends.xla.token_layouts import TokenLayoutKernels
from fusible.tex.calls.attention import PADDING, Served, bounds, check_counts
from fusible.tex.calls.attention_layout import QKVLayout, format_name
from fusible.tex.calls.attention_steps import AttentionBySteps
from fusible.tex.formulas.attention import Gradients, Tokens
from fusible.tex.interface.declare import CallArguments

__all__ = ["AttentionKernels"]


@dataclass(frozen=True)
class _Operands:
    """Q, K and V as ``[n, heads, tokens, width]``, which tokens these are, and the way of a result back to the call's format."""

    q: Tensor
    k: Tensor
    v: Tensor
    queries: Tokens
    keys: Tokens
    restore: Callable[[Tensor, str], Tensor]


def _together(lay: QKVLayout, call: CallArguments) -> _Operands:
    queries, keys = _tokens(lay, call)
    return _Operands(heads_first(call.Q, lay.q), _keys(call.K, lay), _keys(call.V, lay), queries, keys, from_heads_first)


def _paged(lay: QKVLayout, call: CallArguments) -> _Operands:
    """Each sequence by itself: its queries, and all tokens that its row of the page table reaches."""
    longest = int(call.max_seqlen_kv)
    k, v = (kv_cache.gathered(x, table, lay.kv, longest) for x, table in ((call.K, call.page_table_k), (call.V, call.page_table_v)))
    unpacked = kv_cache.UnpackedRows.of(lay, call)
    q = heads_first(call.Q, lay.q) if unpacked is None else unpacked.rows(call.Q)
    b, tokens = q.shape[0], min(k.shape[2], v.shape[2])
    sizes_q = sizes_kv = None
    if unpacked is not None or int(call.attn_mask_type) in PADDING:
        sides = (call.cu_seqlens_q, "q"), (call.cu_seqlens_kv, "kv")
        sizes_q, sizes_kv = (lengths(lazy.cast(bounds(cu, side), lazy.int32)[: b + 1]) for cu, side in sides)
    queries, keys = _dense(b, q.shape[2], sizes_q, False), _dense(b, tokens, sizes_kv, True)
    k, v = (x[:b, :, :tokens] for x in (k, v))
    if keys.inside is not None:
        # Past a sequence's end are pages of others: what is not finite there would come through a probability of 0.
        v = lazy.where(lazy.reshape(keys.inside, (b, 1, tokens, 1)), v, lazy.zeros((), v.dtype))
    return _Operands(q, k, v, queries, keys, from_heads_first if unpacked is None else unpacked.restore)


def _keys(x: Tensor, lay: QKVLayout) -> Tensor:
    """K or V as ``[n, g, t, d]``; beside THD queries, all tokens of all sequences in one batch."""
    x = heads_first(x, lay.kv)
    if lay.q != "THD" or lay.kv == "THD":
        return x
    b, g, s, d = x.shape
    return lazy.reshape(lazy.permute(x, (1, 0, 2, 3)), (1, g, b * s, d))


def _unkeys(x: Tensor, like: Tensor, lay: QKVLayout, to: QKVLayout) -> Tensor:
    """The inverse of ``_keys``, for a gradient of ``like`` in layout ``to``."""
    if lay.q == "THD" and lay.kv != "THD":
        b, g, s, d = heads_first(like, lay.kv).shape
        x = lazy.permute(lazy.reshape(x, (g, b, s, d)), (1, 0, 2, 3))
    return from_heads_first(x, to.kv)


def _tokens(lay: QKVLayout, call: CallArguments) -> tuple[Tokens, Tokens]:
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
            sides.append(_packed(name, x, bounds(cu, side), padded, column))
        else:
            b, _, s, _ = heads_first(x, name).shape
            sizes = lengths(lazy.cast(bounds(cu, side), lazy.int32)) if int(call.attn_mask_type) in PADDING else None
            sides.append(_dense(b, s, sizes, column))
    return sides[0], sides[1]


def _packed(name: str, x: Tensor, cu: Tensor, padded: Tensor | None, column: bool) -> Tokens:
    """Sequences side by side: those of THD, or padded ones (of ``cu``'s lengths) laid out one after the other."""
    if name == "THD":
        tokens, starts = x.shape[0], padded
    else:
        b, _, s, _ = heads_first(x, name).shape
        tokens, starts = b * s, lazy.iota((b,), 0, lazy.int32) * s
    found = thd_segments(tokens, cu, starts)
    shape = (1, 1, 1, tokens) if column else (1, 1, tokens, 1)
    fields = (lazy.reshape(field, shape) for field in (found.sequence, found.position, found.length, found.inside))
    return Tokens(*fields, packed=True)


def _dense(b: int, s: int, sizes: Tensor | None, column: bool) -> Tokens:
    batch = lazy.reshape(lazy.iota((b,), 0, lazy.int32), (b, 1, 1, 1))
    position = lazy.reshape(lazy.iota((s,), 0, lazy.int32), (1, 1, 1, s) if column else (1, 1, s, 1))
    if sizes is None:
        return Tokens(batch, position, lazy.full((1, 1, 1, 1), s, lazy.int32), None, packed=False)
    size = lazy.reshape(sizes, (b, 1, 1, 1))
    return Tokens(batch, position, size, position < size, packed=False)


def _bias_gradient(sc: Scores, g: Gradients) -> Tensor | None:
    """The gradient of the scores summed to the bias's shape; 0 where the bias reaches beyond them."""
    if sc.bias is None:
        return None
    ds = g.scores * sc.scale if sc.pre_scale else g.scores
    if sc.queries.packed:
        return lazy.cast(attention_bias.gathered_back(ds, sc.bias.shape, sc.queries, sc.keys), sc.bias.dtype)
    dims = [d for d in range(4) if sc.bias.shape[d] == 1 and ds.shape[d] != 1]
    if dims:
        ds = lazy.sum(ds, dims, keepdim=True)
    missing = [(0, wanted - have) for wanted, have in zip(sc.bias.shape, ds.shape, strict=True)]
    if any(after for _, after in missing):
        ds = lazy.pad(ds, missing)
    return lazy.cast(ds, sc.bias.dtype)


class AttentionKernels(TokenLayoutKernels, AttentionBySteps):
    _served = Served("xla", frozenset({lazy.float32, lazy.bfloat16, lazy.float16}), paged=True, alibi=True)
    _put_cache = staticmethod(kv_cache.put)

    @staticmethod
    def _seeded(seed: Tensor, offset: int) -> Tensor:
        return lazy.concatenate([seed, lazy.full((1,), offset, lazy.int64)], 0)

    def _attention_operands(self, call: CallArguments) -> tuple[QKVLayout, None]:
        quantizers = (call.dp_quantizer, call.dqkv_quantizer) if hasattr(call, "dO") else (call.o_quantizer,)
        return self._served.check(call, (call.s_quantizer, *quantizers)), None

    def _draw_state(self, call: CallArguments, dropout: float) -> Tensor:
        """A program cannot draw, so dropout takes the state itself in the generator's place."""
        state = call.rng_gen
        if not dropout:
            return lazy.zeros((2,), lazy.int64)
        if not isinstance(state, Tensor) or state.shape != (2,) or state.dtype is not lazy.int64:
            of, got = "dropout in attention on lazy tensors", type(state).__name__
            raise NotServedError(expected("an int64 lazy tensor [2] as rng_gen", of=of, got=got, do="pass rng_state"))
        return state

    def _attended(
        self, call: CallArguments, lay: QKVLayout, offset: Any, dropout: float, rng_state: Any, formats: None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if native_attention.serves(call, lay):
            return native_attention.attended(call, lay, offset, dropout, rng_state)
        operands = _paged(lay, call) if lay.paged else _together(lay, call)
        scores = Scores.of(call, call.Bias, offset, dropout, rng_state, queries=operands.queries, keys=operands.keys)
        if scores.bias is not None and lay.q == "THD":
            attention_bias.check_sequences(scores.bias, call.cu_seqlens_q.size - 1)
        o, stats, largest = attention_math.forward(scores, operands.q, operands.k, operands.v)
        out = lazy.cast(operands.restore(o, format_name(call.o_format, lay.q)), call.Q.dtype)
        if lay.q == "THD" and operands.queries.inside is not None:
            stats = lazy.where(operands.queries.inside, stats, lazy.zeros((), stats.dtype))  # of tokens that are of no sequence, as O
        stats, largest = (operands.restore(x, lay.statistics) for x in (stats, largest))
        return out, stats, largest

    def _attention_gradients(
        self, call: CallArguments, layouts: tuple[QKVLayout, QKVLayout], sides: tuple[Any, Any], stats: Any, rng_state: Any, formats: None = None
    ) -> tuple[Any, Any, Any, Any, Any]:
        (lay, to), (bias, offset), q, k, v = layouts, sides, call.Q, call.K, call.V
        if bias is None and native_attention.serves(call, lay):
            return native_attention.differentiated(call, layouts, offset, stats, rng_state)
        queries, keys = _tokens(lay, call)
        scores = Scores.of(call, bias, offset, call.p_dropout, rng_state, queries=queries, keys=keys)
        o = heads_first(call.O, format_name(call.o_format, lay.q))
        do = heads_first(call.dO, format_name(call.do_format, lay.q))
        g = attention_math.backward(scores, heads_first(q, lay.q), _keys(k, lay), _keys(v, lay), o, do, heads_first(stats, lay.statistics))
        dq = lazy.cast(from_heads_first(g.q, to.q), q.dtype)
        dk, dv = (lazy.cast(_unkeys(d, x, lay, to), x.dtype) for d, x in ((g.k, k), (g.v, v)))
        doffset = None if offset is None or g.extra is None else lazy.sum(g.extra, (0, 2), keepdim=True)
        return dq, dk, dv, _bias_gradient(scores, g), doffset
