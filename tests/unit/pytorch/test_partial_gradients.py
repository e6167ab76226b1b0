"""Where processes of a group share out rows: what stands around the ops that have their own, and that parameters of which each process sees its own
rows alone are marked, whichever tensor a module holds by the time of a call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fusible.ops import GatherRows, ScatterRows
from fusible.ops.sharing import Process, RowShare
from fusible.pytorch import GELU, LayerNorm, Linear, Sequential
from fusible.pytorch.engine import runner
from fusible.pytorch.engine.bound import with_rows
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


def test_ops_that_have_rows_of_their_own_stand_between_what_scatters_and_what_gathers() -> None:
    """Each of these belongs to the module of the op behind it, or of the last one, without parameters, in the same block."""
    rows = RowShare(None, Process(1, 2), True, True)
    whole = [b.within((i,)) for i, b in enumerate(Sequential(LayerNorm(8), GELU(), LayerNorm(8), GELU()).bound_ops())]
    for shared, kinds in (((1, 2), [0, ScatterRows, 1, 2, GatherRows, 3]), ((2, 3), [0, 1, ScatterRows, 2, 3, GatherRows])):
        bound = [b._replace(op=b.op.with_(row_share=rows)) if i in shared else b for i, b in enumerate(whole)]
        found = with_rows(bound)
        assert [bound.index(b) if b in bound else type(b.op) for b in found] == kinds
        for place, b in enumerate(found):
            if b not in bound:
                beside = found[place + 1 if place + 1 < len(found) else -2]
                assert b.module is beside.module and b.block == beside.block and b.parameters == ()
    assert with_rows(whole) == tuple(whole)
