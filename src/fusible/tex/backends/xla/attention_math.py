"""Attention on lazy tensors, in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla import attention_bias
from fusible.tex.backends.xla.arrays import LAZY, fp32
from fusible.tex.backends.xla.random import words
from fusible.tex.calls.attention import ScoreRules
from fusible.tex.formulas.attention import AttentionMath, Gradients, Part, Tokens

__all__ = ["Scores", "backward", "forward"]

_MATH = AttentionMath(
    arrays=LAZY,
    product=lambda a, b, left, right: lazy.dot_general(a, b, ((left,), (right,)), ((0, 1), (0, 1)), dtype=lazy.float32),
    constant=lambda numbers, shape, like: Tensor(np.array(numbers, dtype=np.float32).reshape(shape)),
    counter=lazy.uint64,
    words=words,
)


@dataclass(frozen=True)
class Scores(ScoreRules[Tensor]):
    """What turns Q and K into probabilities, and which tokens they are of."""

    queries: Tokens
    keys: Tokens

    def part(self, queries: int, keys: int) -> Part:
        bias = self.bias
        if bias is not None:
            bias = fp32(attention_bias.gathered(bias, self.queries, self.keys) if self.queries.packed else bias[..., :queries, :keys])
        return Part(self, self.queries, self.keys, bias)


def forward(sc: Scores, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(o [n, h, s, e], stats [n, h, s, 1], largest [n, h, s, 1])``."""
    if q.shape[2] and k.shape[2]:
        return _MATH.forward(sc.part(q.shape[2], k.shape[2]), q, k, fp32(v))
    nothing = lazy.full((*q.shape[:3], 1), -float("inf"))
    return lazy.zeros((*q.shape[:3], v.shape[3])), nothing, nothing


def backward(sc: Scores, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, stats: Tensor) -> Gradients:
    """The gradients of a problem that has queries and keys."""
    q, k, v, o, do = map(fp32, (q, k, v, o, do))
    return _MATH.backward(sc.part(q.shape[2], k.shape[2]), q, k, v, o, do, stats)
