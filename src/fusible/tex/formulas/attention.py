"""The arithmetic of attention: ``q [n, h, s, d]``, ``k [n, g, t, d]``, ``v [n, g, t, e]``, in the dtype that is computed in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusible.tex.calls.attention import BOTTOM_RIGHT, CAUSAL, ScoreRules
from fusible.tex.calls.seeds import drop_threshold
from fusible.tex.enums import NVTE_Softmax_Type
from fusible.tex.formulas.arrays import Array, Arrays, Function

__all__ = ["AttentionMath", "Gradients", "Part", "Tokens"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of queries ``[.., s, 1]`` or of keys ``[.., 1, t]``: their sequence (None: it decides nothing), their position in it, its length.

    ``packed``: several sequences lie side by side, and see nothing of one another. ``inside``: which tokens count, or None for all.
    """

    sequence: Array | None
    position: Array
    length: Array | int
    inside: Array | None
    packed: bool


@dataclass(frozen=True, slots=True)
class Part:
    """What is computed at once: ``rules`` between ``queries`` and ``keys``, and the part of the bias that is theirs."""

    rules: ScoreRules[Any]
    queries: Tokens
    keys: Tokens
    bias: Array | None

    @property
    def diagonal(self) -> Any:
        """The key in whose column each query has its place."""
        place = self.queries.position
        return place + (self.keys.length - self.queries.length) if self.rules.bottom_right_diagonal else place

    def visible(self) -> Any | None:
        """Which keys each query sees, broadcastable to ``[n, h, s, t]``; None where all see all."""
        rules, rows, columns = self.rules, self.queries, self.keys
        i, j = rows.position, columns.position
        found: list[Any] = [tokens.inside for tokens in (rows, columns) if tokens.inside is not None]
        if rows.packed:
            found.append(rows.sequence == columns.sequence)
        if rules.mask in CAUSAL:
            found.append(j <= (i + (columns.length - rows.length) if rules.mask in BOTTOM_RIGHT else i))
        (left, right), diagonal = rules.window, self.diagonal
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


@dataclass
class Gradients:
    """What backward gives: of Q, K, V, the scores (those that a bias has been added to), and the extra logit (per query, where there is one)."""

    q: Any
    k: Any
    v: Any
    scores: Any
    extra: Any | None


def _unseen(scores: Array) -> None:
    pass


@dataclass(frozen=True, slots=True)
class AttentionMath:
    """How a framework computes with heads of tokens."""

    arrays: Arrays
    product: Function
    """``(a, b, left, right)``: of each head, contracted over the dimensions ``left`` of ``a`` and ``right`` of ``b``, 2 or 3."""
    constant: Function
    """``(numbers, shape, like)``: wide numbers where ``like`` is."""
    counter: Any
    """The dtype of a random word's counter."""
    words: Function
    """``(seed, counter)``: the random words."""

    def extra_logit(self, rules: ScoreRules[Any]) -> Any | None:
        """The logit of the denominator's extra term, broadcastable to ``[n, h, s, 1]``."""
        xp = self.arrays
        if rules.softmax == NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX:
            return xp.full((1, 1, 1, 1), 0, xp.float32, rules.rng_state)
        return None if rules.offset is None else xp.reshape(xp.wide(rules.offset), (1, -1, 1, 1))

    def forward(self, part: Part, q: Array, k: Array, v: Array, see: Callable[[Any], None] = _unseen) -> tuple[Any, Any, Any]:
        """``(o [n, h, s, e], stats [n, h, s, 1], largest [n, h, s, 1])`` of what has keys; ``see`` sees the probabilities that V is multiplied by."""
        xp, (n, h, s, _) = self.arrays, q.shape
        p, _ = self._scores(part, q, k)
        largest = xp.largest(p)
        extra = self.extra_logit(part.rules)
        base = largest if extra is None else xp.maximum(largest, extra)
        base = xp.filled(base, base == -math.inf, 0.0)
        p = xp.exp(xp.minus(p, base))
        total = xp.total(p)
        if extra is not None:
            total = xp.plus(total, xp.exp(extra - base))
        stats = xp.plus(xp.log(total), base)
        p = xp.over(p, xp.fill(total, total == 0.0, 1.0))
        kept = self._kept(part, h, q.dtype)
        if kept is not None:
            p = xp.times(p, kept)
        see(p)
        return xp.reshape(self.product(self._grouped(p, k.shape[1]), v, 3, 2), (n, h, s, v.shape[3])), stats, largest

    def backward(
        self, part: Part, q: Array, k: Array, v: Array, o: Array, do: Array, stats: Array, see: Callable[[Any], None] = _unseen
    ) -> Gradients:
        """The gradients of what has queries and keys; ``see`` sees those of the scores."""
        xp, groups, h, scale = self.arrays, k.shape[1], q.shape[1], part.rules.scale
        stats = xp.filled(stats, stats == -math.inf, 0.0)
        p, slope = self._scores(part, q, k)
        p = xp.exp(xp.minus(p, stats))
        kept = self._kept(part, h, q.dtype)
        dropped = p if kept is None else p * kept
        do_grouped = self._grouped(do, groups)
        dv = self.product(self._grouped(dropped, groups), do_grouped, 2, 2)
        del dropped
        ds = xp.reshape(self.product(do_grouped, v, 3, 3), p.shape)
        if kept is not None:
            ds = xp.times(ds, kept)
        delta = xp.total(do * o)
        ds = xp.times(xp.minus(ds, delta), p)
        see(ds)
        grouped = self._grouped(ds if slope is None else xp.times(slope, ds), groups)
        dq = xp.times(xp.reshape(self.product(grouped, k, 3, 2), q.shape), scale)
        dk = xp.times(self.product(grouped, self._grouped(q, groups), 2, 2), scale)
        extra = self.extra_logit(part.rules)
        return Gradients(dq, dk, dv, ds, None if extra is None else -xp.times(xp.exp(extra - stats), delta))

    def _scores(self, part: Part, q: Array, k: Array) -> tuple[Any, Any | None]:
        """The scores, and where they are capped the derivative of the cap."""
        xp, rules, (n, h, s, _) = self.arrays, part.rules, q.shape
        scores = xp.reshape(self.product(self._grouped(q, k.shape[1]), k, 3, 3), (n, h, s, k.shape[2]))
        if part.bias is not None and rules.pre_scale:
            scores = xp.plus(scores, part.bias)
        scores, slope = xp.times(scores, rules.scale), None
        if rules.soft_cap is not None:
            scores = xp.tanh(xp.over(scores, rules.soft_cap))
            slope = 1.0 - scores * scores
            scores = xp.times(scores, rules.soft_cap)
        if part.bias is not None and not rules.pre_scale:
            scores = xp.plus(scores, part.bias)
        if rules.slopes is not None:
            distances = xp.cast(xp.abs(part.diagonal - part.keys.position), scores.dtype)
            scores = xp.minus_product(scores, self.constant(rules.slopes, (1, -1, 1, 1), scores), distances)
        visible = part.visible()
        return (scores if visible is None else xp.hidden(scores, visible, -math.inf)), slope

    def _grouped(self, x: Array, groups: int) -> Any:
        """``[n, h, s, d] -> [n, g, h / g * s, d]``: the queries of a kv head, one after the other."""
        n, h, s, d = x.shape
        return self.arrays.reshape(x, (n, groups, h // groups * s, d))

    def _kept(self, part: Part, heads: int, dtype: Any) -> Any | None:
        """The dropout mask times ``1 / (1 - p)``, or None without dropout."""
        xp, rules = self.arrays, part.rules
        if not rules.dropout:
            return None
        state, places = rules.rng_state, (part.queries.sequence, part.queries.position, part.keys.position)
        batch, row, column = (xp.cast(x, self.counter) for x in places)
        head = xp.reshape(xp.arange(heads, self.counter, state), (1, -1, 1, 1))
        element = ((batch * heads + head) * rules.max_sq + row) * rules.max_skv + column
        drawn = self.words(state[:1], xp.plus(element, xp.bitcast(state[1:], self.counter) << 40))
        return xp.where(drawn >= drop_threshold(rules.dropout), 1 / (1 - rules.dropout), xp.full((), 0, xp.accumulator(dtype), state))
