"""The router token by token in float64: what the tests of the router compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclass(frozen=True)
class Router:
    score: str
    topk: int
    pre_softmax: bool = False
    groups: int | None = None
    group_topk: int | None = None
    scaling: float | None = None
    bias: Tensor | None = None

    @property
    def arguments(self) -> dict[str, object]:
        """The call's arguments beside the logits."""
        return {
            "topk": self.topk,
            "use_pre_softmax": self.pre_softmax,
            "num_groups": self.groups,
            "group_topk": self.group_topk,
            "scaling_factor": self.scaling,
            "score_function": self.score,
            "expert_bias": self.bias,
        }

    def scores(self, logits: Tensor) -> Tensor:
        """float64 scores, differentiable; the logits themselves where the softmax comes last."""
        if self.score == "sigmoid":
            return torch.sigmoid(logits)
        if self.score == "sqrtsoftplus":
            return torch.sqrt(torch.log1p(torch.exp(logits)))
        return torch.softmax(logits, -1) if self.pre_softmax else logits

    def chosen(self, scores: list[float]) -> list[int]:
        """The experts of one token, the best first."""
        biased = [score + (self.bias[e].item() if self.bias is not None else 0.0) for e, score in enumerate(scores)]
        allowed = range(len(biased))
        if self.groups and self.group_topk:
            size, each = len(biased) // self.groups, self.topk // self.group_topk
            strength = [sum(sorted(biased[i * size : (i + 1) * size], reverse=True)[:each]) for i in range(self.groups)]
            best = sorted(range(self.groups), key=lambda i: (-strength[i], i))[: self.group_topk]
            allowed = sorted(e for i in best for e in range(i * size, (i + 1) * size))
        return sorted(allowed, key=lambda e: (-biased[e], e))[: self.topk]

    def weights(self, scores: Tensor, experts: list[int]) -> Tensor:
        """The weights of one token's ``experts``, differentiable."""
        values = scores[experts]
        if self.score == "softmax":
            values = values if self.pre_softmax else torch.softmax(values, -1)
        elif self.topk > 1:
            values = values / (values.sum() + 1e-20)
        return values * (1.0 if self.scaling is None else self.scaling)

    def __call__(self, logits: Tensor) -> tuple[Tensor, list[list[int]]]:
        """``(probs, experts)`` of float64 ``logits [T, E]``, differentiable."""
        rows, experts = [], []
        for row in logits:
            scores = self.scores(row)
            experts.append(self.chosen(scores.tolist()))
            rows.append(torch.zeros_like(row).index_put((torch.tensor(experts[-1]),), self.weights(scores, experts[-1])))
        return torch.stack(rows), experts


def byte_map(experts: list[list[int]], count: int) -> Tensor:
    return torch.tensor([[e in row for e in range(count)] for row in experts])


def bit_map(experts: list[list[int]], count: int) -> Tensor:
    rows = [[sum(1 << e % 8 for e in row if e // 8 == byte) for byte in range(math.ceil(count / 8))] for row in experts]
    return torch.tensor(rows, dtype=torch.uint8)
