"""Scaling states of models whose layers, or whose rows, are shared out: which group's amaxes count, and states that are put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusible
from fusible.compute_pipeline import StateLayout
from fusible.pytorch.engine.scaling import ScalingOwner, join_states, with_largest_amaxes
from fusible.quantized import DelayedScaling

WIDTH, CPU = 16, torch.device("cpu")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The groups that were asked for the largest of their amaxes, of which another process has 5.0 for each."""
    groups: list[Any] = []

    def all_reduce(tensor: Tensor, how: Any, group: Any) -> None:
        assert how == torch.distributed.ReduceOp.MAX
        groups.append(group)
        tensor.clamp_(min=5.0)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return groups


def test_the_group_of_an_autocast_goes_before_that_of_the_layers(asked: list[Any]) -> None:
    layer, of_layer, of_autocast = fusible.Linear(WIDTH, WIDTH), object(), object()
    layer.amax_group = of_layer
    x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    for group, wanted in ((None, of_layer), (of_autocast, of_autocast)):
        for _ in range(2):
            with fusible.autocast(recipe=DelayedScaling(), amax_reduction_group=group):
                layer(x).sum().backward()
        assert asked and all(each is wanted for each in asked)
        asked.clear()
        layer.reset_scaling_state()


def seen(layout: StateLayout, amaxes: dict[str, float]) -> ScalingOwner:
    """A state in the middle of its second iteration."""
    owner, recipe = ScalingOwner(layout), DelayedScaling(amax_history_len=3)
    for factor in (1.0, 2.0):
        owner.commit_forward(owner.snapshot(recipe, CPU), {slot: torch.tensor([factor * amaxes[slot]]) for slot in layout.forward})
        owner.commit_backward({slot: torch.tensor([factor * amaxes[slot]]) for slot in layout.backward})
    return owner


def saved(owner: ScalingOwner) -> Tensor:
    state = owner.save()
    assert state is not None
    return state


def read(owner: ScalingOwner, state: Tensor) -> dict[str, list[Any]]:
    found = owner.read(state)
    tensors = {f"{name} {field}": getattr(found[name], field).tolist() for name in ("forward", "backward") for field in ("scale", "amax_history")}
    return {**tensors, "open": [found["open"]]}


def test_states_of_parts_one_after_another_are_the_state_of_the_whole() -> None:
    first, second = StateLayout(("0.x", "0.weight"), ("0.dy",)), StateLayout(("0.x",), ("0.dy", "1.dy"))
    whole = StateLayout(("0.x", "0.weight", "1.x"), ("0.dy", "1.dy", "2.dy"))
    amaxes = {"0.x": 1.0, "0.weight": 2.0, "1.x": 3.0, "0.dy": 5.0, "1.dy": 7.0, "2.dy": 11.0}
    parts = [seen(first, amaxes), seen(second, {"0.x": 3.0, "0.dy": 7.0, "1.dy": 11.0})]
    owner = seen(whole, amaxes)
    assert read(owner, join_states([saved(part) for part in parts])) == read(owner, saved(owner))


def test_of_what_has_not_entered_a_scale_yet_the_largest_of_all_processes_is_saved(asked: list[Any]) -> None:
    """As when its iteration closes; what has entered one is the same in each."""
    owner, group = seen(StateLayout(("0.x", "0.weight"), ("0.dy",)), {"0.x": 1.5, "0.weight": 3.5, "0.dy": 1.0}), object()
    before, after = read(owner, saved(owner)), read(owner, with_largest_amaxes(saved(owner), group))
    assert before["forward amax_history"][0] == [3.0, 7.0] and before["backward amax_history"][0] == [2.0]
    assert after["forward amax_history"][0] == [5.0, 7.0] and after["backward amax_history"][0] == [5.0]
    assert asked == [group, group]
    for name in ("forward amax_history", "backward amax_history"):
        before[name][0] = after[name][0]
    assert before == after
