"""The arithmetic of attention on lazy tensors: ``q [n, h, s, d]``, ``k [n, g, t, d]``, ``v [n, g, t, e]``, fp32 throughout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla import attention_bias
from fusible.tex.backends.xla.attention_bias import Tokens
from fusible.tex.backends.xla.random import drop_threshold, words
from fusible.tex.calls.attention import BOTTOM_RIGHT, CAUSAL, ScoreRules
from fusible.tex.enums import NVTE_Softmax_Type

__all__ = ["Gradients", "Scores", "backward", "forward"]

_INFINITY = float("inf")


@dataclass(frozen=True)
class Scores(ScoreRules[Tensor]):
    """What turns Q and K into probabilities, and which tokens they are of."""

    queries: Tokens
    keys: Tokens

    def extra_logit(self) -> Tensor | None:
        """The logit of the denominator's extra term, broadcastable to ``[n, h, s, 1]``."""
        if self.softmax == NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX:
            return lazy.zeros((1, 1, 1, 1))
        return None if self.offset is None else lazy.reshape(lazy.cast(self.offset, lazy.float32), (1, -1, 1, 1))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """``[n, h, s, d] -> [n, g, h / g * s, d]``: the queries of a kv head, one after the other."""
    n, h, s, d = x.shape
    return lazy.reshape(x, (n, groups, h // groups * s, d))


def _dot(a: Tensor, b: Tensor, left: int, right: int) -> Tensor:
    """The product of each head, in fp32, contracted over the dimensions ``left`` and ``right``."""
    return lazy.dot_general(a, b, ((left,), (right,)), ((0, 1), (0, 1)), dtype=lazy.float32)


def _bias(sc: Scores, queries: int, keys: int) -> Tensor | None:
    """What is added to the scores, which broadcast from it."""
    if sc.bias is None:
        return None
    found = attention_bias.gathered(sc.bias, sc.queries, sc.keys) if sc.queries.apart else sc.bias[..., :queries, :keys]
    return lazy.cast(found, lazy.float32)


def _scores(sc: Scores, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """The scores, and where they are capped the derivative of the cap."""
    n, h, s, _ = q.shape
    scores = lazy.reshape(_dot(_grouped(q, k.shape[1]), k, 3, 3), (n, h, s, k.shape[2]))
    bias = _bias(sc, s, k.shape[2])
    if bias is not None and sc.pre_scale:
        scores = scores + bias
    scores, slope = scores * sc.scale, None
    if sc.soft_cap is not None:
        share = lazy.tanh(scores / sc.soft_cap)
        scores, slope = share * sc.soft_cap, 1.0 - share * share
    if bias is not None and not sc.pre_scale:
        scores = scores + bias
    if sc.slopes is not None:
        slopes = Tensor(np.array(sc.slopes, dtype=np.float32).reshape(1, -1, 1, 1))
        scores = scores - slopes * lazy.cast(lazy.abs(_diagonal(sc) - sc.keys.position), lazy.float32)
    visible = _visible(sc)
    return (scores if visible is None else lazy.where(visible, scores, -_INFINITY)), slope


def _diagonal(sc: Scores) -> Tensor:
    """The key in whose column each query has its place."""
    place = sc.queries.position
    return place + (sc.keys.length - sc.queries.length) if sc.bottom_right_diagonal else place


def _visible(sc: Scores) -> Tensor | None:
    """Which keys each query sees, broadcastable to ``[n, h, s, t]``; None where all see all."""
    rows, columns = sc.queries, sc.keys
    i, j = rows.position, columns.position
    end_offset = columns.length - rows.length
    found: list[Tensor] = [tokens.inside for tokens in (rows, columns) if tokens.inside is not None]
    if rows.apart:
        found.append(rows.sequence == columns.sequence)
    if sc.mask in CAUSAL:
        found.append(j <= (i + end_offset if sc.mask in BOTTOM_RIGHT else i))
    left, right = sc.window
    diagonal = _diagonal(sc)
    if left >= 0:
        found.append(j >= diagonal - left)
    if right >= 0:
        found.append(j <= diagonal + right)
    if not found:
        return None
    visible = found[0]
    for other in found[1:]:
        visible = visible & other
    return visible


def _kept(sc: Scores, heads: int) -> Tensor | None:
    """The dropout mask times ``1 / (1 - p)``, or None without dropout."""
    if not sc.dropout:
        return None
    wide = lazy.uint64
    batch, row, column = (lazy.cast(x, wide) for x in (sc.queries.sequence, sc.queries.position, sc.keys.position))
    head = lazy.reshape(lazy.iota((heads,), 0, wide), (1, -1, 1, 1))
    element = ((batch * heads + head) * sc.max_sq + row) * sc.max_skv + column
    drawn = words(sc.rng_state[:1], element + (lazy.bitcast(sc.rng_state[1:], wide) << 40))
    return lazy.where(drawn >= drop_threshold(sc.dropout), 1 / (1 - sc.dropout), lazy.zeros(()))


def forward(sc: Scores, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(o [n, h, s, e], stats [n, h, s, 1], largest [n, h, s, 1])``."""
    n, h, s, _ = q.shape
    if not k.shape[2] or not s:
        nothing = lazy.full((n, h, s, 1), -_INFINITY)
        return lazy.zeros((n, h, s, v.shape[3])), nothing, nothing
    p, _ = _scores(sc, q, k)
    largest = lazy.max(p, -1, keepdim=True)
    extra = sc.extra_logit()
    base = largest if extra is None else lazy.maximum(largest, extra)
    base = lazy.where(base == -_INFINITY, 0.0, base)
    p = lazy.exp(p - base)
    total = lazy.sum(p, -1, keepdim=True)
    if extra is not None:
        total = total + lazy.exp(extra - base)
    stats = lazy.log(total) + base
    p = p / lazy.where(total == 0.0, 1.0, total)
    kept = _kept(sc, h)
    if kept is not None:
        p = p * kept
    o = _dot(_grouped(p, k.shape[1]), lazy.cast(v, lazy.float32), 3, 2)
    return lazy.reshape(o, (n, h, s, v.shape[3])), stats, largest


@dataclass
class Gradients:
    """What backward gives: of Q, K, V, the scores (those that a bias has been added to), and the extra logit (per query, where there is one)."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    extra: Tensor | None


def backward(sc: Scores, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, stats: Tensor) -> Gradients:
    """The gradients of a problem that has queries and keys."""
    groups, h = k.shape[1], q.shape[1]
    q, k, v, o, do = (lazy.cast(x, lazy.float32) for x in (q, k, v, o, do))
    stats = lazy.where(stats == -_INFINITY, 0.0, stats)
    scores, slope = _scores(sc, q, k)
    p = lazy.exp(scores - stats)
    kept = _kept(sc, h)
    dropped = p if kept is None else p * kept
    do_grouped = _grouped(do, groups)
    dv = _dot(_grouped(dropped, groups), do_grouped, 2, 2)
    ds = lazy.reshape(_dot(do_grouped, v, 3, 3), p.shape)
    if kept is not None:
        ds = ds * kept
    delta = lazy.sum(do * o, -1, keepdim=True)
    ds = (ds - delta) * p
    grouped = _grouped(ds if slope is None else ds * slope, groups)
    dq = lazy.reshape(_dot(grouped, k, 3, 2), q.shape) * sc.scale
    dk = _dot(grouped, _grouped(q, groups), 2, 2) * sc.scale
    extra = sc.extra_logit()
    return Gradients(dq, dk, dv, ds, None if extra is None else -(lazy.exp(extra - stats) * delta))
