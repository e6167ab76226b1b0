"""Parameters of which each process of a group sees the rows of its own alone are marked, whichever tensor a module holds by the time of a call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fusible.pytorch import GELU, LayerNorm, Linear, Sequential
from fusible.pytorch.engine import runner
from fusible.pytorch.engine.sequence_parallel import _groups


def test_parameters_between_what_scatters_and_what_gathers_are_marked_at_each_training_call(monkeypatch: pytest.MonkeyPatch) -> None:
    span, group = SimpleNamespace(group=(group := object())), group
    monkeypatch.setattr(runner, "sharded_rows", lambda ops: [span, span, *[None] * (len(ops) - 2)])
    model = Sequential(LayerNorm(8), GELU(), Linear(8, 8))
    with torch.no_grad():
        model(torch.ones(3, 8))
    assert not hasattr(model[0].weight, "sequence_parallel")
    for _ in range(2):
        model[0].weight = torch.nn.Parameter(torch.ones(8))
        model(torch.ones(3, 8))
        assert all(p.sequence_parallel and _groups[p] is group for p in model[0].parameters())
        assert not any(hasattr(p, "sequence_parallel") or p in _groups for p in model[2].parameters())
