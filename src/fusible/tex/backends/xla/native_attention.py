"""Attention by the native kernels of a program, in tiles: no scores of all tokens lie in memory."""

from __future__ import annotations

import math
from typing import Any

from fusible import cpp_extensions, lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla import native
from fusible.tex.backends.xla.heads_first import from_heads_first, heads_first
from fusible.tex.backends.xla.kv_cache import memory_of
from fusible.tex.backends.xla.native import Result
from fusible.tex.backends.xla.segments import thd_segments
from fusible.tex.calls.attention import BOTTOM_RIGHT, CAUSAL, PADDING, ScoreRules, bounds, check_counts
from fusible.tex.calls.attention_layout import QKVLayout, format_name
from fusible.tex.enums import NVTE_Bias_Type, NVTE_Softmax_Type
from fusible.tex.interface.declare import CallArguments

__all__ = ["attended", "differentiated", "serves"]


def serves(call: CallArguments, lay: QKVLayout) -> bool:
    """Whether the kernels compute a call: on tensors of one dtype, by rules that they know."""
    beyond = [call.Bias if hasattr(call, "Bias") else None, getattr(call, "soft_cap", None), getattr(call, "alibi_slopes", None)]
    if int(call.bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS or beyond != [None] * 3:
        return False
    if len({x.dtype for x in (call.Q, call.K, call.V)}) > 1:
        return False
    return native.serves(call.Q, call.K, call.V) or (lay.paged and cpp_extensions.available and native.takes(call.Q) and 0 not in call.Q.shape)


def attended(call: CallArguments, lay: QKVLayout, offset: Tensor | None, dropout: float, rng_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """O, and the statistics of its rows."""
    rules = ScoreRules.of(call, None, offset, dropout, rng_state)
    (k, of_k), (v, of_v) = (memory_of(x) or (x, None) for x in (call.K, call.V))
    q, k, v = (_tokens_first(x, name) for x, name in ((call.Q, lay.q), (k, lay.kv), (v, lay.kv)))
    flat = lay.q == "THD"  # of whose tokens some may be of no sequence
    row = Result((*q.shape[:-1], 1), lazy.float32, flat)
    results = {"out": Result((*q.shape[:-1], v.shape[-1]), call.Q.dtype, flat), "stats": row, "largest": row}
    order = {"after_k": of_k, "after_v": of_v}
    more = {**_rules(rules), **_lengths(lay, call), **_pages(call), **_extra(rules, q.shape[-2]), **order}
    written = native.call("attention_forward", {"q": q, "k": k, "v": v, **results, **more})
    names = (format_name(call.o_format, lay.q), lay.statistics, lay.statistics)
    out, stats, largest = (_from_tokens_first(written[of], name) for of, name in zip(results, names, strict=True))
    if flat:
        inside = thd_segments(q.shape[0], bounds(call.cu_seqlens_q, "q"), call.cu_seqlens_q_padded).inside
        largest = lazy.where(lazy.reshape(inside, (q.shape[0], 1, 1)), largest, lazy.full((), -math.inf))
    return out, stats, largest


def differentiated(
    call: CallArguments, layouts: tuple[QKVLayout, QKVLayout], offset: Tensor | None, stats: Tensor, rng_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None]:
    """The gradients of Q, K and V, of no bias, and of the offset."""
    lay, to = layouts
    rules = ScoreRules.of(call, None, offset, call.p_dropout, rng_state)
    names = (lay.q, lay.kv, lay.kv, format_name(call.o_format, lay.q), format_name(call.do_format, lay.q), lay.statistics)
    tensors = (call.Q, call.K, call.V, call.O, call.dO, stats)
    q, k, v, out, grad, rows = (_tokens_first(x, name) for x, name in zip(tensors, names, strict=True))
    out, grad = (lazy.cast(x, call.Q.dtype) for x in (out, grad))
    results = {name: Result(x.shape, x.dtype, "THD" in (lay.q, lay.kv)) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    if offset is not None:
        results["extra_gradient"] = Result((1, q.shape[-2], 1, 1), lazy.float32)
    operands = {"q": q, "k": k, "v": v, "out": out, "grad": grad, "stats": rows}
    written = native.call("attention_backward", {**operands, **results, **_rules(rules), **_lengths(lay, call), **_extra(rules, q.shape[-2])})
    dq, dk, dv = (_from_tokens_first(written[of], name) for of, name in (("dq", to.q), ("dk", to.kv), ("dv", to.kv)))
    return dq, dk, dv, None, written.get("extra_gradient")


def _tokens_first(x: Tensor, name: str) -> Tensor:
    """``[b, s, h, d]``, or of THD ``[t, h, d]``."""
    return x if name in ("BSHD", "THD") else lazy.permute(heads_first(x, name), (0, 2, 1, 3))


def _from_tokens_first(x: Tensor, name: str) -> Tensor:
    return x if name in ("BSHD", "THD") else from_heads_first(lazy.permute(x, (0, 2, 1, 3)), name)


def _rules(rules: ScoreRules[Tensor]) -> dict[str, Any]:
    left, right = rules.window
    mask = {"causal": rules.mask in CAUSAL, "causal_bottom_right": rules.mask in BOTTOM_RIGHT, "window_bottom_right": rules.bottom_right_diagonal}
    drawn = {"dropout": rules.dropout, "rng_state": rules.rng_state, "max_seqlen_q": rules.max_sq, "max_seqlen_kv": rules.max_skv}
    return {"scale": rules.scale, **mask, "window_left": left, "window_right": right, **drawn}


def _lengths(lay: QKVLayout, call: CallArguments) -> dict[str, Tensor]:
    """Cumulative lengths and starts of queries and keys, where sequences are not all as long as memory is."""
    flat = "THD" in (lay.q, lay.kv)
    if not flat and int(call.attn_mask_type) not in PADDING:
        return {}
    q, kv = (lazy.cast(bounds(x, side), lazy.int32) for side, x in (("q", call.cu_seqlens_q), ("kv", call.cu_seqlens_kv)))
    check_counts(q.size - 1, kv.size - 1)
    starts = {"starts_q": call.cu_seqlens_q_padded, "starts_kv": call.cu_seqlens_kv_padded} if flat else {}
    return {"lengths_q": q, "lengths_kv": kv} | {name: lazy.cast(x, lazy.int32) for name, x in starts.items() if x is not None}


def _pages(call: CallArguments) -> dict[str, Tensor]:
    """The page tables of K and V."""
    tables = {"page_table_k": call.page_table_k, "page_table_v": call.page_table_v}
    return {name: lazy.cast(table, lazy.int32) for name, table in tables.items() if table is not None}


def _extra(rules: ScoreRules[Tensor], heads: int) -> dict[str, Tensor]:
    """The logit of the denominator's extra term, of each head."""
    if rules.softmax == NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX:
        return {"extra_logits": lazy.zeros((heads,))}
    return {} if rules.offset is None else {"extra_logits": lazy.reshape(lazy.cast(rules.offset, lazy.float32), (heads,))}
