"""What backends say of requests: the same when asked again, with nothing changed by asking, and with a reason for a no; of every function."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusible import tex
from fusible.conformance.coverage import decisions
from fusible.conformance.crossing import Crossing
from fusible.conformance.table import load
from fusible.errors import BackendError
from fusible.tex.backends import template
from fusible.tex.interface.declare import DECLARATIONS, Request
from fusible.tex.selection.decision import refusal
from fusible.tex.selection.registry import registry

DEVICES = ("cpu", "cuda", "lazy", "meta")


def on(device: str, kind: Hashable) -> Hashable:
    """A kind with the tensors in it on another device."""
    if not isinstance(kind, tuple):
        return device if kind == "cpu" else kind
    return tuple(on(device, part) for part in kind)


def requests_of(function: str) -> Iterator[Request]:
    """What the table's samples ask for in one dtype, with a quantizer of each format, and on each device; of a function without samples, nothing that
    decides."""
    record = load().get(function)
    if record is None:
        yield Request(function, tuple((name, None) for name in DECLARATIONS[function].asks))
        return
    dtype = torch.bfloat16 if torch.bfloat16 in record.dtypes else record.dtypes[0]
    made = dict.fromkeys(decision.request for _, decision in decisions(record, dtype, Crossing))
    for request in made:
        for device in DEVICES:
            yield replace(request, kinds=tuple((name, on(device, kind)) for name, kind in request.kinds))


def state(backend: tex.TEXBackendBase) -> tuple[Any, ...]:
    """What asking could change."""
    chosen = registry.epoch, registry.policy, tuple(sorted(registry.registered()))
    return *chosen, dict(vars(backend)), dict(os.environ), set(sys.modules), torch.get_rng_state().tolist()


@pytest.fixture
def with_template() -> Iterator[None]:
    template.register(registry)
    yield
    registry.unregister_backend("template")


@pytest.mark.parametrize("function", sorted(DECLARATIONS))
@pytest.mark.usefixtures("with_template")
def test_asking_twice_gives_the_same_and_changes_nothing_and_a_no_has_a_reason(function: str) -> None:
    asked = list(requests_of(function))
    assert asked
    for backend in registry.ordered():
        first = [refusal(backend, request) for request in asked]
        before = state(backend)
        again = [refusal(backend, request) for request in asked]
        assert again == first and state(backend) == before, backend.NAME
        for reason in filter(None, first):
            assert "\n" not in reason and not reason.endswith(".") and len(reason) > 10, (backend.NAME, reason)
        lacking = backend.lacks(function)
        assert lacking is None or set(first) == {lacking}, backend.NAME


ANSWERS: list[Any] = [False, True, "", " ", 0, ["no"]]


@pytest.fixture(params=ANSWERS, ids=repr)
def unreasoned(request: pytest.FixtureRequest) -> Iterator[str]:
    class Unreasoned(tex.TEXBackendBase):
        NAME = "unreasoned"
        PRIORITY = 1000

        @tex.requires(lambda _: request.param)
        def gelu(self, input: Any, quantizer: Any) -> Any:
            return input

    tex.register_backend(Unreasoned)
    yield repr(request.param)
    registry.unregister_backend("unreasoned")


def test_an_answer_that_is_no_reason_is_the_backends_fault(unreasoned: str) -> None:
    with pytest.raises(BackendError, match=r"the backend unreasoned asked for gelu.*: expected a reason or None, got ") as raised:
        tex.gelu(torch.ones(2), None)
    assert f"got {unreasoned}; let its supports" in str(raised.value)


@pytest.mark.parametrize("answer", [False, "", " "], ids=repr)
def test_why_a_backend_cannot_run_is_never_empty(answer: Any) -> None:
    class Silent(tex.TEXBackendBase):
        NAME = "silent"

        def unavailable(self) -> Any:
            return answer

    tex.register_backend(Silent)
    try:
        (row,) = (row for row in tex.list_backends() if row["name"] == "silent")
        assert not row["available"] and row["reason"] == f"its unavailable() is {answer!r}"
    finally:
        registry.unregister_backend("silent")
