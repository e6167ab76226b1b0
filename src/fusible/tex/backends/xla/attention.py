"""Scaled dot-product attention on lazy tensors: what is served, and how a problem's tokens are told apart.

A THD batch is one sequence of all its tokens under a block-diagonal mask, made in the program from the cumulative lengths. So one program serves
every batch of as many tokens and sequences, at the price of scores between all of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible import lazy
from fusible.errors import ArgumentError, NotServedError, ShapeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla import attention_math
from fusible.tex.backends.xla.attention_math import Gradients, Scores, Tokens
from fusible.tex.backends.xla.dropout import check_probability
from fusible.tex.backends.xla.layout import Layout, format_name, from_heads_first, heads_first, layout
from fusible.tex.backends.xla.segments import lengths, thd_segments
from fusible.tex.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout, NVTE_Softmax_Type
from fusible.tex.interface.attention import Attention
from fusible.tex.protocol import is_quantized

__all__ = ["AttentionKernels"]

_FLOATING = frozenset({lazy.float32, lazy.bfloat16, lazy.float16})
_PADDING = frozenset(
    {NVTE_Mask_Type.NVTE_PADDING_MASK, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK}
)


class AttentionKernels(Attention):
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
        lay = _check(qkv_layout, bias_type, Q, K, V, (s_quantizer, o_quantizer), page_table_k)
        dropout = p_dropout if is_training else 0.0
        check_probability(dropout, "fused_attn_fwd")
        rng_state = _rng_state(dropout, rng_gen)
        tokens = _tokens(lay, Q, K, attn_mask_type, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        scores = _scores(
            attn_scale, attn_mask_type, window_size, bottom_right_diagonal, bias_type, Bias, softmax_type, SoftmaxOffset, dropout, rng_state,
            max_seqlen_q, max_seqlen_kv, tokens,
        )  # fmt: skip
        o, stats, largest = attention_math.forward(scores, heads_first(Q, lay.q), _keys(K, lay), _keys(V, lay))
        out = lazy.cast(from_heads_first(o, format_name(o_format, lay.q)), Q.dtype)
        stats_name = "THD" if lay.q == "THD" else "BHSD"
        stats, largest = (from_heads_first(x, stats_name) for x in (stats, largest))
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
        lay = _check(qkv_layout, bias_type, Q, K, V, (s_quantizer, dp_quantizer, dqkv_quantizer), None)
        if layout(dqkv_layout) != lay:
            got = NVTE_QKV_Layout(int(dqkv_layout)).name
            raise NotServedError(expected("the dimension order of qkv_layout", of="dqkv_layout", got=got, do="pass qkv_layout, or its packed form"))
        check_probability(p_dropout, "fused_attn_bwd")
        stats, rng_state, bias, offset = _auxiliary(Aux_CTX_Tensors, bias_type, softmax_type)
        tokens = _tokens(lay, Q, K, attn_mask_type, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        scores = _scores(
            attn_scale, attn_mask_type, window_size, bottom_right_diagonal, bias_type, bias, softmax_type, offset, p_dropout, rng_state,
            max_seqlen_q, max_seqlen_kv, tokens,
        )  # fmt: skip
        o = heads_first(O, format_name(o_format, lay.q))
        do = heads_first(dO, format_name(do_format, lay.q))
        stats = heads_first(stats, "THD" if lay.q == "THD" else "BHSD")
        g = attention_math.backward(scores, heads_first(Q, lay.q), _keys(K, lay), _keys(V, lay), o, do, stats)
        dq = lazy.cast(from_heads_first(g.q, lay.q), Q.dtype)
        dk, dv = (lazy.cast(_unkeys(d, x, lay), x.dtype) for d, x in ((g.k, K), (g.v, V)))
        extra = None if g.extra is None else lazy.sum(g.extra, (0, 2), keepdim=True)
        return [dq, dk, dv, _bias_gradient(scores, g), None if offset is None else extra]


def _check(qkv_layout: Any, bias_type: Any, q: Any, k: Any, v: Any, quantizers: tuple[Any, ...], page_table: Any) -> Layout:
    lay = layout(qkv_layout)
    reason = None
    if any(is_quantized(x) for x in (q, k, v)) or any(quantizer is not None for quantizer in quantizers):
        reason = "FP8 attention is not served; bfloat16, float16 and float32 are"
    elif lay is None:
        reason = f"layout {NVTE_QKV_Layout(int(qkv_layout)).name} is not served; sbhd, bshd, bhsd and thd are, packed or separate"
    elif page_table is not None:
        reason = "a paged KV cache is not served"
    elif int(bias_type) == NVTE_Bias_Type.NVTE_ALIBI:
        reason = "ALiBi is not served; no bias, a pre-scale and a post-scale bias are"
    elif lay.q == "THD" and int(bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS:
        reason = "a bias of THD is not served; no bias is"
    elif q.dtype not in _FLOATING:
        reason = f"{q.dtype} is not served; float32, bfloat16 and float16 are"
    if reason is not None or lay is None:
        raise NotServedError(expected("a problem it serves", of="the xla backend's attention", got=f"one where {reason}", do="change that"))
    for name, x, dims in (("Q", q, lay.q), ("K", k, lay.kv), ("V", v, lay.kv)):
        if x.ndim != len(dims):
            raise ShapeError(expected(f"[{', '.join(dims.lower())}]", of=f"{name} of attention", got=list(x.shape), do="reshape it"))
    if q.shape[lay.q.index("H")] % k.shape[lay.kv.index("H")] or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        wanted = "equal widths of Q and K, equal tokens of K and V, Q's heads a multiple of theirs"
        raise ShapeError(expected(wanted, of="attention", got=f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}", do="reshape them"))
    return lay


def _rng_state(dropout: float, state: Any) -> Tensor:
    """``(seed, offset)``: a program cannot draw, so dropout takes the state itself in the generator's place."""
    if not dropout:
        return lazy.zeros((2,), lazy.int64)
    if not isinstance(state, Tensor) or state.shape != (2,) or state.dtype is not lazy.int64:
        raise NotServedError(
            expected("an int64 lazy tensor [2] as rng_gen", of="dropout in attention on lazy tensors", got=type(state).__name__, do="pass rng_state")
        )
    return state


def _scores(
    scale: float, mask: Any, window: Sequence[int] | None, diagonal: bool, bias_type: Any, bias: Tensor | None, softmax: Any, offset: Tensor | None,
    dropout: float, rng_state: Tensor, max_sq: int, max_skv: int, tokens: tuple[Tokens, Tokens],
) -> Scores:  # fmt: skip
    has_bias = int(bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS
    learnable = int(softmax) == NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX
    for wanted, given, name in ((has_bias, bias, "Bias"), (learnable, offset, "SoftmaxOffset")):
        if wanted and given is None:
            raise ShapeError(expected(f"a {name} tensor", of="attention of that type", got="None", do=f"pass {name}"))
    left, right = (-1, -1) if window is None else (int(window[0]), int(window[1]))
    return Scores(
        float(scale), int(mask), (left, right), bool(diagonal), int(bias_type), bias if has_bias else None, int(softmax),
        offset if learnable else None, float(dropout), rng_state, int(max_sq), int(max_skv), *tokens,
    )  # fmt: skip


def _keys(x: Tensor, lay: Layout) -> Tensor:
    """K or V as ``[n, g, t, d]``; beside THD queries, all tokens of all sequences in one batch."""
    x = heads_first(x, lay.kv)
    if lay.q != "THD" or lay.kv == "THD":
        return x
    b, g, s, d = x.shape
    return lazy.reshape(lazy.permute(x, 1, 0, 2, 3), (1, g, b * s, d))


def _unkeys(x: Tensor, like: Tensor, lay: Layout) -> Tensor:
    """The inverse of ``_keys``, for a gradient of ``like``."""
    if lay.q == "THD" and lay.kv != "THD":
        b, g, s, d = heads_first(like, lay.kv).shape
        x = lazy.permute(lazy.reshape(x, (g, b, s, d)), 1, 0, 2, 3)
    return from_heads_first(x, lay.kv)


def _tokens(
    lay: Layout, q: Tensor, k: Tensor, mask: Any, cu_q: Tensor | None, cu_kv: Tensor | None, padded_q: Tensor | None, padded_kv: Tensor | None
) -> tuple[Tokens, Tokens]:
    """The queries and the keys of a problem."""
    sides = []
    if cu_q is not None and cu_kv is not None and cu_q.shape != cu_kv.shape:
        counts = f"{cu_q.size - 1} and {cu_kv.size - 1}"
        raise ArgumentError(expected("equally many sequences", of="cu_seqlens_q and cu_seqlens_kv", got=counts, do="pass one of each per sequence"))
    for name, x, cu, padded, column in ((lay.q, q, cu_q, padded_q, False), (lay.kv, k, cu_kv, padded_kv, True)):
        if lay.q == "THD":
            sides.append(_apart(name, x, _given(cu, column), padded, column))
        else:
            b, _, s, _ = heads_first(x, name).shape
            sizes = lengths(lazy.cast(_given(cu, column), lazy.int32)) if int(mask) in _PADDING else None
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


def _given(cu: Tensor | None, column: bool) -> Tensor:
    if cu is None:
        of = "cu_seqlens_kv" if column else "cu_seqlens_q"
        raise ArgumentError(expected("cumulative lengths [b + 1]", of=of, got="None", do="pass them for THD and padding masks"))
    return cu


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


def _auxiliary(tensors: Sequence[Tensor], bias_type: Any, softmax_type: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """``(Stats, rng_state, Bias, SoftmaxOffset)`` of what forward returned."""
    has_bias = int(bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS
    learnable = int(softmax_type) == NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX
    count = 2 + has_bias + learnable
    if len(tensors) != count:
        do = "pass what the forward returned after O, without Max"
        raise ShapeError(expected(f"{count} tensors", of="Aux_CTX_Tensors", got=len(tensors), do=do))
    rest = list(tensors[2:])
    return tensors[0], tensors[1], rest.pop(0) if has_bias else None, rest.pop(0) if learnable else None
