"""Attention by the native kernels of a program, in tiles: no scores of all tokens lie in memory."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla import native
from fusible.tex.backends.xla.heads_first import from_heads_first, heads_first
from fusible.tex.backends.xla.native import Result
from fusible.tex.calls.attention import BOTTOM_RIGHT, CAUSAL, PADDING, ScoreRules, bounds, check_counts
from fusible.tex.calls.attention_layout import Layout, format_name
from fusible.tex.enums import NVTE_Bias_Type, NVTE_Softmax_Type
from fusible.tex.interface.declare import CallArguments

__all__ = ["attended", "differentiated", "serves"]


def serves(call: CallArguments, lay: Layout) -> bool:
    """Whether the kernels compute a call: on dense sequences of one dtype, by rules that they know."""
    beyond = [call.Bias if hasattr(call, "Bias") else None, getattr(call, "soft_cap", None), getattr(call, "alibi_slopes", None)]
    if lay.paged or "THD" in (lay.q, lay.kv) or int(call.bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS or beyond != [None] * 3:
        return False
    return len({x.dtype for x in (call.Q, call.K, call.V)}) == 1 and native.serves(call.Q, call.K, call.V)


def attended(call: CallArguments, lay: Layout, offset: Tensor | None, dropout: float, rng_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """O, and the statistics of its rows."""
    rules = ScoreRules.of(call, None, offset, dropout, rng_state)
    q, k, v = (_tokens_first(x, name) for x, name in ((call.Q, lay.q), (call.K, lay.kv), (call.V, lay.kv)))
    row = Result((*q.shape[:-1], 1), lazy.float32)
    results = {"out": Result((*q.shape[:-1], v.shape[-1]), call.Q.dtype), "stats": row, "largest": row}
    written = native.call("attention_forward", {"q": q, "k": k, "v": v, **results, **_rules(rules), **_lengths(call), **_extra(rules, q.shape[-2])})
    names = (format_name(call.o_format, lay.q), lay.statistics, lay.statistics)
    out, stats, largest = (_from_tokens_first(written[of], name) for of, name in zip(results, names, strict=True))
    return out, stats, largest


def differentiated(
    call: CallArguments, layouts: tuple[Layout, Layout], offset: Tensor | None, stats: Tensor, rng_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None]:
    """The gradients of Q, K and V, of no bias, and of the offset."""
    lay, to = layouts
    rules = ScoreRules.of(call, None, offset, call.p_dropout, rng_state)
    names = (lay.q, lay.kv, lay.kv, format_name(call.o_format, lay.q), format_name(call.do_format, lay.q), lay.statistics)
    given = (call.Q, call.K, call.V, call.O, call.dO, stats)
    q, k, v, out, grad, rows = (_tokens_first(x, name) for x, name in zip(given, names, strict=True))
    out, grad = (lazy.cast(x, call.Q.dtype) for x in (out, grad))
    results = {"dq": Result(q.shape, q.dtype), "dk": Result(k.shape, k.dtype), "dv": Result(v.shape, v.dtype)}
    if offset is not None:
        results["extra_gradient"] = Result((1, q.shape[-2], 1, 1), lazy.float32)
    operands = {"q": q, "k": k, "v": v, "out": out, "grad": grad, "stats": rows}
    written = native.call("attention_backward", {**operands, **results, **_rules(rules), **_lengths(call), **_extra(rules, q.shape[-2])})
    dq, dk, dv = (_from_tokens_first(written[of], name) for of, name in (("dq", to.q), ("dk", to.kv), ("dv", to.kv)))
    return dq, dk, dv, None, written.get("extra_gradient")


def _tokens_first(x: Tensor, name: str) -> Tensor:
    """``[b, s, h, d]``."""
    return x if name == "BSHD" else lazy.permute(heads_first(x, name), (0, 2, 1, 3))


def _from_tokens_first(x: Tensor, name: str) -> Tensor:
    return x if name == "BSHD" else from_heads_first(lazy.permute(x, (0, 2, 1, 3)), name)


def _rules(rules: ScoreRules[Tensor]) -> dict[str, Any]:
    left, right = rules.window
    mask = {"causal": rules.mask in CAUSAL, "causal_bottom_right": rules.mask in BOTTOM_RIGHT, "window_bottom_right": rules.bottom_right_diagonal}
    drawn = {"dropout": rules.dropout, "rng_state": rules.rng_state, "max_seqlen_q": rules.max_sq, "max_seqlen_kv": rules.max_skv}
    return {"scale": rules.scale, **mask, "window_left": left, "window_right": right, **drawn}


def _lengths(call: CallArguments) -> dict[str, Tensor]:
    """Cumulative lengths, where sequences are not all as long as memory is."""
    if int(call.attn_mask_type) not in PADDING:
        return {}
    q, kv = (lazy.cast(bounds(x, side), lazy.int32) for side, x in (("q", call.cu_seqlens_q), ("kv", call.cu_seqlens_kv)))
    check_counts(q.size - 1, kv.size - 1)
    return {"lengths_q": q, "lengths_kv": kv}


def _extra(rules: ScoreRules[Tensor], heads: int) -> dict[str, Tensor]:
    """The logit of the denominator's extra term, of each head."""
    if rules.softmax == NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX:
        return {"extra_logits": lazy.zeros((heads,))}
    return {} if rules.offset is None else {"extra_logits": lazy.reshape(lazy.cast(rules.offset, lazy.float32), (heads,))}
