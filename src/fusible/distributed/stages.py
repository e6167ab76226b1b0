"""Cutting a ``Sequential`` into the stages of a pipeline of processes, for ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.pytorch import Sequential

__all__ = ["split_stages"]


def split_stages(model: Sequential, stages: int | Sequence[int]) -> list[Sequential]:
    """``model`` in stages that follow one another, for ``PipelineStage(stages[rank], rank, len(stages), device)``.

    ``stages``: their number, and they have as equal a cost as its modules allow, which is the number of elements of their matrices; or the indices of
    the modules that begin the second stage, the third and so on. Modules keep the names that they have in ``model``, and so do parameters; their
    scales under delayed scaling go with them. Raises ``ArgumentError`` for more stages than modules, and for indices that do not ascend inside of the
    list.
    """
    if not isinstance(model, Sequential):
        do = "cut the Sequential in it"
        raise DTypeError(expected("a fusible.Sequential", of="model of split_stages", got=f"a {type(model).__name__}", do=do))
    named = list(model.named_children())
    cuts = _equal_cuts([_cost(module) for _, module in named], stages) if isinstance(stages, int) else list(stages)
    if any(not isinstance(cut, int) for cut in cuts) or not all(a < b for a, b in pairwise([0, *cuts, len(named)])):
        do = "name the modules that begin the second stage, the third and so on"
        raise ArgumentError(expected(f"ascending indices from 1 to {len(named) - 1}", of="stages of split_stages", got=cuts, do=do))
    made = [Sequential(dict(named[start:stop])) for start, stop in pairwise([0, *cuts, len(named)])]
    for stage in made:
        stage.go_on_from(model)
    return made


def _cost(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)


def _equal_cuts(costs: Sequence[int], stages: int) -> list[int]:
    """Where to cut, so that the dearest stage is as cheap as can be; of several ways the one that cuts first."""
    if not 1 <= stages <= len(costs):
        do = "give another number"
        raise ArgumentError(expected(f"from 1 to {len(costs)} stages, as many as modules", of="stages of split_stages", got=stages, do=do))
    before = [0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[n]: for n modules in so many stages as there were rounds, the cost of the dearest stage and the cuts.
    best: list[tuple[int, list[int]] | None] = [(before[n], []) for n in range(len(costs) + 1)]
    for done in range(1, stages):
        best = [_cheapest(best, before, n) if n > done else None for n in range(len(costs) + 1)]
    found = best[len(costs)]
    assert found is not None
    return found[1]


def _cheapest(best: Sequence[tuple[int, list[int]] | None], before: Sequence[int], n: int) -> tuple[int, list[int]]:
    """The first ``n`` modules in one stage more than ``best`` has."""
    ways = [(max(former[0], before[n] - before[cut]), [*former[1], cut]) for cut, former in enumerate(best[:n]) if former is not None and cut]
    return min(ways)
