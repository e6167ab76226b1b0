"""Two threads, one scaling state: nothing that was observed is lost."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fusible.compute_pipeline import StateLayout
from fusible.pytorch.scaling import ScalingOwner
from fusible.quantized import DelayedScaling


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
    """Of the running iteration alone, for the next one; a look at what is upcoming is without a word to the others."""
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
        assert groups == [group, group] * reduced and before.forward.amax_history[0].item() == 2.0 and before.backward.amax_history[0].item() == 3.5
        scales = [after.forward.scale.item(), after.backward.scale.item()]
        assert scales == ([448 / 4, 57344 / 7] if reduced else [448 / 2, 57344 / 3.5])
        groups.clear()
