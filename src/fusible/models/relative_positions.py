"""T5's relative positions: what each head adds to a score, by how far the key is from the query (Raffel et al. 2019, arXiv:1910.10683)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fusible.models.parts import Weights

__all__ = ["RelativePositions", "RelativeTable"]


@dataclass(frozen=True)
class RelativeTable:
    """The table ``name``, ``[buckets, heads]``: of distances below half of the buckets one each, beyond that in equal ratios up to ``farthest``, from
    where on all are one bucket. ``both_ways``: half of the buckets are for keys behind the query; else these are as near as can be."""

    name: str
    buckets: int
    heads: int
    farthest: int
    both_ways: bool

    def made(self, weights: Weights) -> nn.Module:
        return RelativePositions(self, weights.values(self.name, (self.buckets, self.heads)))

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield self.name, module.weight


class RelativePositions(nn.Module):
    """What is added to scores, ``[rows, heads, queries, keys]`` (see ``RelativeTable``)."""

    counts_places = True

    def __init__(self, plan: RelativeTable, weight: torch.Tensor) -> None:
        super().__init__()
        self.plan, self.weight = plan, nn.Parameter(weight)

    def forward(self, starts: Sequence[int], queries: int, keys: int) -> torch.Tensor:
        """Of ``queries`` that follow one another from the place ``start`` on, a row for each of ``starts``, and keys from place 0 on."""
        device = self.weight.device
        places = torch.tensor(starts, device=device)[:, None] + torch.arange(queries, device=device)
        distances = torch.arange(keys, device=device) - places[..., None]
        return F.embedding(self._bucket(distances), self.weight).permute(0, 3, 1, 2)

    def _bucket(self, distances: torch.Tensor) -> torch.Tensor:
        """The row of a distance, key minus query."""
        plan = self.plan
        count = plan.buckets // 2 if plan.both_ways else plan.buckets
        first = (distances > 0) * count if plan.both_ways else 0
        away = distances.abs() if plan.both_ways else -distances.clamp_max(0)
        exact = count // 2
        ratio = math.log(plan.farthest / exact)
        far = exact + (torch.log(away.clamp_min(1).float() / exact) / ratio * (count - exact)).long()
        return first + torch.where(away < exact, away, far.clamp_max(count - 1))
