"""Cutting a ``Sequential`` into the stages of a pipeline of processes, for ``torch.distributed.pipelining``; and what all stages have, together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from safetensors.torch import load, save
from torch import nn

from fusible.distributed.exchange import gather_bytes
from fusible.errors import ArgumentError, DTypeError, expected
from fusible.pytorch import Sequential
from fusible.pytorch.engine.scaling import join_states

__all__ = ["gather_stages", "split_stages"]

Tensors = Mapping[str, torch.Tensor]

_RUNS = "runs of "
"""Before the name of a ``Sequential`` in what a stage sends: which of the parts that it calls are pipelines of its own."""


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


def gather_stages(stage: nn.Module, tensors: Tensors, group: Any) -> dict[str, torch.Tensor]:
    """By the names of the model in one process what all stages have, of ``tensors`` by the names of this process's ``stage``: parameters, moments, a
    state dict; each whole, as ``gather_tensors`` gives them. The scaling states of a ``Sequential`` that ``split_stages`` cut are as it had them.

    Every process of ``group``, along ``pp``, calls it; each gets all, on the CPU. ``split_stages`` of a model that has loaded them is the way back.
    """
    runs = {
        f"{_RUNS}{name}": torch.tensor([isinstance(part, list) for part in module._parts()], device="cpu")
        for name, module in stage.named_modules()
        if isinstance(module, Sequential)
    }
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    device = next((parameter.device for parameter in stage.parameters()), torch.device("cpu"))
    stages = [load(content) for content in gather_bytes(save({**own, **runs}), group, device)]
    cut = {name.removeprefix(_RUNS): None for of_stage in stages for name in of_stage if name.startswith(_RUNS)}
    states = {name: state for path in cut for name, state in _joined_states(path, stages).items()}
    return {**{name: tensor for of_stage in stages for name, tensor in of_stage.items()}, **states}


def _joined_states(path: str, stages: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Take the scaling states of the ``Sequential`` at ``path`` out of what the stages have: by their names those of the whole one. A pipeline that
    reaches the end of a stage goes on at the beginning of the next. One without 8-bit operands has no state."""
    prefix = f"{path}.scaling_state" if path else "scaling_state"
    pipelines: list[list[torch.Tensor]] = []
    goes_on = False
    for of_stage in stages:
        place = 0
        for is_run in of_stage.pop(f"{_RUNS}{path}", torch.empty(0, device="cpu")).tolist():
            if is_run:
                if not goes_on:
                    pipelines.append([])
                state = of_stage.pop(f"{prefix}.{place}", None)
                pipelines[-1] += [] if state is None else [state]
                place += 1
            goes_on = is_run
    return {f"{prefix}.{index}": join_states(parts) for index, parts in enumerate(pipelines) if parts}


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
