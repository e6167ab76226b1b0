"""Cutting a Sequential into stages: by indices, and by equal cost."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

import fusible
from fusible.distributed import split_stages
from fusible.errors import ArgumentError, DTypeError


def chain(*widths: int) -> fusible.Sequential:
    return fusible.Sequential(*(fusible.Linear(a, b) for a, b in pairwise(widths)))


def sizes(stages: list[fusible.Sequential]) -> list[int]:
    return [len(stage) for stage in stages]


def test_stages_after_one_another_are_the_whole() -> None:
    model, x = chain(8, 4, 16, 8, 2), torch.randn(3, 8)
    for stages in (1, 2, 3, 4, [1], [1, 3]):
        y = x
        parts = split_stages(model, stages)
        for part in parts:
            y = part(y)
        assert torch.equal(y, model(x))
        names = [name for part in parts for name, _ in part.named_parameters()]
        assert names == [name for name, _ in model.named_parameters()]
        assert all(p is q for part, q in zip([p for part in parts for p in part.parameters()], model.parameters(), strict=True) for p in [part])


def test_scales_go_with_their_modules() -> None:
    """Each stage goes on as the whole would: with its scales and amaxes."""
    model, recipe = chain(8, 4, 16, 8, 2), fusible.DelayedScaling()
    with fusible.autocast(recipe=recipe):
        for _ in range(3):
            model(torch.randn(16, 8)).sum().backward()
    whole = model.pipeline(0).scaling.current
    assert whole is not None
    stages, at = split_stages(model, [1, 3]), 0
    for stage in stages:
        state = stage.pipeline(0).scaling.current
        assert state is not None and stage.pipeline(0).scaling.open
        for then, now in ((whole.forward, state.forward), (whole.backward, state.backward)):
            for slot in now.slots:
                place, _, name = slot.partition(".")
                column, of_whole = now.slots.index(slot), then.slots.index(f"{int(place) + at}.{name}")
                assert torch.equal(now.scale[column], then.scale[of_whole])
                assert torch.equal(now.amax_history[:, column], then.amax_history[:, of_whole])
        at += len(list(stage.bound_ops()))
    assert model.pipeline(0).scaling.current is whole
    x = torch.randn(16, 8)
    with fusible.autocast(recipe=recipe), torch.no_grad():
        y = x
        for stage in stages:
            y = stage(y)
        assert torch.equal(y, model(x))


@pytest.mark.parametrize("widths", [(8, 8, 8, 8, 8), (2, 64, 2, 2, 2, 64, 64), (1, 2, 3, 4, 5, 6), (9, 1, 9, 1, 9)])
def test_the_dearest_stage_is_as_cheap_as_can_be(widths: tuple[int, ...]) -> None:
    costs = [a * b for a, b in pairwise(widths)]
    for stages in range(1, len(costs) + 1):
        cuts = sizes(split_stages(chain(*widths), stages))
        ways = [(0, *cut, len(costs)) for cut in combinations(range(1, len(costs)), stages - 1)]
        best = min(max(sum(costs[a:b]) for a, b in pairwise(way)) for way in ways)
        ends = [sum(cuts[:i]) for i in range(len(cuts) + 1)]
        assert max(sum(costs[a:b]) for a, b in pairwise(ends)) == best


@pytest.mark.parametrize(
    ("stages", "error", "message"),
    [
        (0, ArgumentError, "stages of split_stages: expected from 1 to 3 stages, as many as modules, got 0"),
        (4, ArgumentError, "expected from 1 to 3 stages, as many as modules, got 4"),
        ([0], ArgumentError, r"expected ascending indices from 1 to 2, got \[0\]"),
        ([2, 1], ArgumentError, r"expected ascending indices from 1 to 2, got \[2, 1\]"),
        ([3], ArgumentError, "expected ascending indices from 1 to 2"),
        ([1.5], ArgumentError, "expected ascending indices from 1 to 2"),
    ],
)
def test_what_are_no_stages_is_refused(stages: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        split_stages(chain(2, 2, 2, 2), stages)


def test_another_module_is_refused() -> None:
    with pytest.raises(DTypeError, match="model of split_stages: expected a fusible.Sequential, got a Linear"):
        split_stages(fusible.Linear(2, 2), 1)  # type: ignore[arg-type]
