"""What ``explain`` says of gradients that processes sum."""

from __future__ import annotations

import pytest
import torch

import fusible
from fusible.pytorch.engine.autocast import current_autocast
from fusible.pytorch.engine.shares import Share


@pytest.mark.parametrize(("summed", "line"), [(True, ["  all_reduce  weight  48 bytes"]), (False, [])])
def test_a_message_is_named_with_its_bytes(summed: bool, line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fusible.Linear(4, 3)
    runner = fusible.Sequential(layer).pipeline(0)
    plan = runner.plan(torch.randn(2, 4), runner.parameters(), current_autocast(), True)
    assert runner._describe_sums(plan) == []
    monkeypatch.setattr(runner, "_shares", [(layer, Share(("weight",), (None,), ("0" if summed else None,))), (layer, Share.all_of("bias"))])
    assert runner._describe_sums(plan) == (["", "between processes, gradients", *line] if line else [])
