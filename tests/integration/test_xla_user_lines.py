"""Which line of the user's a compiled pass is recorded by: where torch calls the module, none of torch's own."""

from __future__ import annotations

import pytest
import torch

import fusible.pytorch as te
from fusible.errors import CompileError
from fusible.lazy.evaluation.compiler import watching
from fusible.lazy.flat_ir.ops import DotOp
from fusible.lazy.source import place_of
from fusible.lazy.trace.trace import Trace


class _Outer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = te.Sequential(te.Linear(width, 32), te.Linear(32, width)).compile(executor="xla")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _lines(trace: Trace) -> set[tuple[str, int]]:
    return {place_of(op.outputs[0].source)[:2] for op in trace.ops}


def test_a_compiled_pass_is_recorded_by_the_users_own_line_and_none_of_torchs() -> None:
    recorded: list[set[tuple[str, int]]] = []
    model = _Outer(24)
    with watching(lambda kind, trace: recorded.append(_lines(trace))):
        model(torch.ones(4, 24)).sum().backward()
    first = _Outer.forward.__code__.co_firstlineno
    here = test_a_compiled_pass_is_recorded_by_the_users_own_line_and_none_of_torchs.__code__.co_firstlineno
    assert recorded == [{(__file__, first + 1)}, {(__file__, here + 4)}]


def test_what_an_engine_refuses_of_a_compiled_pass_shows_the_call_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise ValueError("planted")

    model = _Outer(40)
    loss = model(torch.ones(4, 40)).sum()
    monkeypatch.setattr(DotOp, "to_mlir", refuse)
    with pytest.raises(CompileError) as caught:
        loss.backward()
    assert str(caught.value).split("\n")[1:3] == ["    loss.backward()", "    ^^^^^^^^^^^^^^^"]
    with pytest.raises(CompileError) as caught:
        _Outer(56)(torch.ones(4, 56))
    assert str(caught.value).split("\n")[1:3] == ["    return self.inner(x)", "           ^^^^^^^^^^^^^"]
