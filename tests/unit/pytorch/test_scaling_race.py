"""Two threads, one scaling state: nothing that was observed is lost."""

from __future__ import annotations

import torch

from fusible.compute_pipeline import StateLayout
from fusible.pytorch.scaling import ScalingOwner
from fusible.quantized import DelayedScaling


def test_a_backward_between_a_forwards_snapshot_and_its_commit_is_kept() -> None:
    owner, recipe, cpu = ScalingOwner(StateLayout(("0.x",), ("0.dy",))), DelayedScaling(amax_history_len=4), torch.device("cpu")
    owner.commit_forward(owner.snapshot(recipe, cpu), {"0.x": torch.tensor([2.0])})
    second = owner.snapshot(recipe, cpu)
    owner.commit_backward({"0.dy": torch.tensor([3.0])})
    owner.commit_forward(second, {"0.x": torch.tensor([4.0])})
    assert owner.current is not None
    assert owner.current.backward.amax_history[0].item() == 3.0 and owner.current.forward.amax_history[0].item() == 4.0
    third = owner.snapshot(recipe, cpu)
    assert third.backward.scale.item() == (torch.tensor(57344.0) / 3).item() and third.forward.scale.item() == 448 / 4


def test_two_forwards_on_one_snapshot_close_one_iteration() -> None:
    owner, recipe, cpu = ScalingOwner(StateLayout(("0.x",), ())), DelayedScaling(amax_history_len=8), torch.device("cpu")
    owner.commit_forward(owner.snapshot(recipe, cpu), {"0.x": torch.tensor([1.0])})
    first, second = owner.snapshot(recipe, cpu), owner.snapshot(recipe, cpu)
    owner.commit_forward(first, {"0.x": torch.tensor([5.0])})
    owner.commit_forward(second, {"0.x": torch.tensor([7.0])})
    assert owner.current is not None
    assert owner.current.forward.amax_history[:, 0].tolist() == [7.0, 0, 0, 0, 0, 0, 0, 1.0]
