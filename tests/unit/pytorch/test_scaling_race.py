"""Two threads, one scaling state: nothing that was observed is lost."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
import torch

from fusible.compute_pipeline import StateLayout
from fusible.pytorch.engine.scaling import ScalingOwner
from fusible.quantized import DelayedScaling, Format


def test_a_backward_between_a_forwards_snapshot_and_its_commit_is_kept() -> None:
    owner, recipe, cpu = ScalingOwner(StateLayout(("0.x",), ("0.dy", "1.dy"))), DelayedScaling(amax_history_len=4), torch.device("cpu")
    owner.commit_forward(owner.snapshot(recipe, cpu), {"0.x": torch.tensor([2.0])})
    second = owner.snapshot(recipe, cpu)
    owner.commit_backward({"0.dy": torch.tensor([3.0]), "1.dy": torch.tensor([5.0])})
    owner.commit_forward(second, {"0.x": torch.tensor([4.0])})
    assert owner.current is not None
    assert owner.current.backward.amax_history[0].tolist() == [3.0, 5.0] and owner.current.forward.amax_history[0].item() == 4.0
    third = owner.snapshot(recipe, cpu)
    assert third.backward.scale[0].item() == (torch.tensor(57344.0) / 3).item() and third.forward.scale.item() == 448 / 4


def test_two_forwards_on_one_snapshot_close_one_iteration() -> None:
    owner, recipe, cpu = ScalingOwner(StateLayout(("0.x",), ())), DelayedScaling(amax_history_len=8), torch.device("cpu")
    owner.commit_forward(owner.snapshot(recipe, cpu), {"0.x": torch.tensor([1.0])})
    first, second = owner.snapshot(recipe, cpu), owner.snapshot(recipe, cpu)
    owner.commit_forward(first, {"0.x": torch.tensor([5.0])})
    owner.commit_forward(second, {"0.x": torch.tensor([7.0])})
    assert owner.current is not None
    assert owner.current.forward.amax_history[:, 0].tolist() == [7.0, 0, 0, 0, 0, 0, 0, 1.0]


def test_an_inference_between_a_forward_and_its_backward_is_not_what_the_backward_repeats() -> None:
    owner, recipe, cpu = ScalingOwner(StateLayout(("0.x",), ("0.dy",))), DelayedScaling(), torch.device("cpu")
    owner.commit_forward(owner.snapshot(recipe, cpu), {"0.x": torch.tensor([2.0])})
    inferred = owner.snapshot(recipe, cpu, inference=True)
    assert owner.current is not inferred and owner.snapshot(recipe, cpu, repeated=True) is owner.current
    owner.commit_backward({"0.dy": torch.tensor([3.0])})
    again = owner.snapshot(recipe, cpu, inference=True)
    assert owner.current is not again and owner.snapshot(recipe, cpu, repeated=True) is again


def test_amaxes_of_several_processes_are_reduced_in_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the running iteration alone, for the next one, all by one message; a look at what is upcoming is without a word to the others."""
    groups = []

    def all_reduce(amaxes: torch.Tensor, how: object, group: object) -> None:
        assert how == torch.distributed.ReduceOp.MAX
        groups.append(group)
        amaxes.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    owner, cpu, group = ScalingOwner(StateLayout(("0.x",), ("0.dy",))), torch.device("cpu"), object()
    for rule, reduced in product(("max", "most_recent"), (True, False)):
        recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=rule, reduce_amax=reduced)
        owner.reset()
        owner.commit_forward(owner.snapshot(recipe, cpu, group), {"0.x": torch.tensor([2.0])})
        owner.commit_backward({"0.dy": torch.tensor([3.5])})
        before = owner.current
        assert before is not None and owner.upcoming(recipe) is not None and not groups
        after = owner.snapshot(recipe, cpu, group)
        assert groups == [group] * reduced and before.forward.amax_history[0].item() == 2.0 and before.backward.amax_history[0].item() == 3.5
        scales = [after.forward.scale.item(), after.backward.scale.item()]
        assert scales == ([448 / 4, 57344 / 7] if reduced else [448 / 2, 57344 / 3.5])
        groups.clear()


def orders(calls: int, steps: int) -> list[tuple[int, ...]]:
    """Every order in which so many calls may take so many steps each: whose step comes next."""
    return sorted(set(permutations([call for call in range(calls) for _ in range(steps)])))


@pytest.mark.parametrize("order", orders(3, 2), ids=lambda order: "".join(map(str, order)))
def test_whatever_the_order_of_snapshots_and_commits_each_amax_is_in_its_iteration(order: tuple[int, ...]) -> None:
    """Of calls that find one iteration open, the first to commit closes it, and the others are observed in the next one. What is observed in an
    iteration after the next one has begun to be computed is observed in that one as well."""
    for amaxes in permutations((3.0, 5.0, 7.0)):
        owner, recipe, cpu = ScalingOwner(StateLayout(("0.x",), ("0.dy",))), DelayedScaling(amax_history_len=8), torch.device("cpu")
        owner.commit_forward(owner.snapshot(recipe, cpu), {"0.x": torch.tensor([1.0])})
        rows: list[list[float]] = [[1.0]]
        taken: dict[int, Any] = {}
        for call in order:
            if call not in taken:
                taken[call] = len(rows), len(rows[-1]), owner.snapshot(recipe, cpu)
                continue
            iteration, seen, snapshot = taken[call]
            owner.commit_forward(snapshot, {"0.x": torch.tensor([amaxes[call]])})
            if iteration == len(rows):
                late = rows[-1] if len(rows[-1]) > seen else []
                rows[-1:] = [rows[-1][:seen], list(late)]
            rows[-1].append(amaxes[call])
        assert owner.current is not None
        history, wanted = owner.current.forward.amax_history[:, 0].tolist(), [max(row) for row in rows[::-1]]
        assert [history[0], *history[:0:-1]] == wanted + [0.0] * (8 - len(wanted)) and max(amaxes) in history


@pytest.mark.parametrize("order", orders(2, 3), ids=lambda order: "".join(map(str, order)))
def test_whatever_the_order_of_two_training_steps_no_gradients_amax_is_lost(order: tuple[int, ...]) -> None:
    for amaxes in permutations((3.0, 5.0)):
        owner, recipe, cpu = ScalingOwner(StateLayout(("0.x",), ("0.dy",))), DelayedScaling(amax_history_len=8), torch.device("cpu")
        at, snapshots = [0, 0], {}
        for call in order:
            at[call] += 1
            if at[call] == 1:
                snapshots[call] = owner.snapshot(recipe, cpu)
            elif at[call] == 2:
                owner.commit_forward(snapshots[call], {"0.x": torch.tensor([amaxes[call]])})
            else:
                owner.commit_backward({"0.dy": torch.tensor([amaxes[call]])})
        assert owner.current is not None
        for state in (owner.current.forward, owner.current.backward):
            assert max(amaxes) in state.amax_history[:, 0].tolist()
        forward, backward = owner.snapshot(recipe, cpu).forward, owner.snapshot(recipe, cpu).backward
        assert forward.scale.item() == (torch.tensor(448.0) / 5).item() and backward.scale.item() == (torch.tensor(57344.0) / 5).item()


OPTIONS = [
    DelayedScaling(amax_history_len=window, fp8_format=format) for window in (1, 4, 16) for format in (Format.E4M3, Format.HYBRID, Format.E5M2)
]


@pytest.mark.parametrize("before", OPTIONS, ids=repr)
def test_a_state_is_adapted_to_whichever_option_is_another(before: DelayedScaling) -> None:
    """The format of either direction, the window: of one alone too; and where nothing is, the very state is taken."""
    for after, closed in product(OPTIONS, (False, True)):
        owner, cpu = ScalingOwner(StateLayout(("0.x",), ("0.dy",))), torch.device("cpu")
        owner.commit_forward(owner.snapshot(before, cpu), {"0.x": torch.tensor([2.0])})
        owner.commit_backward({"0.dy": torch.tensor([3.0])})
        repeated = owner.snapshot(after, cpu, repeated=closed)
        for state, format in ((repeated.forward, after.fp8_format.forward), (repeated.backward, after.fp8_format.backward)):
            assert state.fp8_dtype == format and len(state.amax_history) == after.amax_history_len
        assert (repeated is owner.current) == (closed and after == before)


@pytest.mark.parametrize("how", ["load", "reset"])
@pytest.mark.parametrize("steps", range(4))
def test_a_call_from_before_a_load_does_not_bring_the_former_state_back(steps: int, how: str) -> None:
    """It is observed in what was loaded, however many calls were committed between; after a reset, it begins anew from what it saw."""
    layout, recipe, cpu = StateLayout(("0.x",), ("0.dy",)), DelayedScaling(amax_history_len=8), torch.device("cpu")
    saved, owner = ScalingOwner(layout), ScalingOwner(layout)
    saved.commit_forward(saved.snapshot(recipe, cpu), {"0.x": torch.tensor([64.0])})
    owner.commit_forward(owner.snapshot(recipe, cpu), {"0.x": torch.tensor([1.0])})
    before = owner.snapshot(recipe, cpu)
    for step in range(steps):
        owner.commit_forward(owner.snapshot(recipe, cpu), {"0.x": torch.tensor([2.0 + step])})
    state = saved.save()
    assert state is not None
    if how == "load":
        owner.load(state)
    else:
        owner.reset()
    owner.commit_forward(before, {"0.x": torch.tensor([7.0])})
    assert owner.current is not None
    history = owner.current.forward.amax_history[:, 0].tolist()
    assert history == ([64.0] + [0.0] * 7 if how == "load" else [7.0] + [0.0] * 6 + [1.0])
