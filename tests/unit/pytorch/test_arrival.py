"""What comes from a collective that is on its way is waited for before a pass reads it: inputs, and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import fusible


def on_its_way(x: torch.Tensor) -> torch.Tensor:
    return AsyncCollectiveTensor(x)


@pytest.mark.parametrize("recipe", [None, fusible.Float8CurrentScaling(), fusible.DelayedScaling()], ids=["none", "current", "delayed"])
def test_inputs_and_gradients_are_waited_for(recipe: fusible.Recipe | None, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.Tensor] = []
    wait = AsyncCollectiveTensor.trigger_wait
    monkeypatch.setattr(AsyncCollectiveTensor, "trigger_wait", lambda self: waited.append(self) or wait(self))
    torch.manual_seed(0)
    model = fusible.Sequential(fusible.Linear(16, 16), fusible.GELU(), fusible.Linear(16, 16))
    x, dy = torch.randn(16, 16), torch.randn(16, 16)
    found = []
    for wrap in (torch.clone, on_its_way):
        model.zero_grad()
        with fusible.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(wrap(x))
        y.backward(wrap(dy))
        found.append([y.detach(), *(parameter.grad for parameter in model.parameters())])
    assert len(waited) == 2 and all(x.__class__ is torch.Tensor for x in found[1])
    if recipe is None or not recipe.delayed():  # by whose scale the second call is another
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
