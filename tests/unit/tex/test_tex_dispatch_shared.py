"""Choices are shared: by whoever imported tex earlier, by threads, and with a forked child."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import fusible.tex as imported_earlier
from fusible import tex
from fusible.knobs import Knob
from fusible.tex import relu
from fusible.tex.selection.registry import registry

X = torch.randn(4, 6)


class Counting(tex.TEXBackendBase):
    NAME, PRIORITY = "counting", 400
    asked: Counter[str] = Counter()

    def unavailable(self) -> str | None:
        self.asked["unavailable"] += 1
        return None

    @tex.requires(lambda request: Counting.asked.update(["supports"]))
    def relu(self, input, quantizer):
        self.asked["relu"] += 1
        return input + 100


@pytest.fixture
def counting() -> Iterator[Counter[str]]:
    Counting.asked = Counter()
    tex.register_backend(Counting)
    yield Counting.asked
    registry.unregister_backend("counting")


def test_nothing_is_asked_again_once_a_kind_of_call_is_known(counting: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    relu(X, None)
    before = Counter(counting)
    reads: list[str] = []
    monkeypatch.setattr(Knob, "text", property(lambda knob: reads.append(knob.name)))
    locks: list[None] = []

    class Lock:
        def __enter__(self) -> None:
            locks.append(None)

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(registry, "_lock", Lock())
    for _ in range(100):
        relu(X, None)
    assert not reads and not locks
    assert counting - before == Counter(relu=100)


def test_set_backend_reaches_a_function_that_was_imported_earlier(counting: Counter[str]) -> None:
    functions = (relu, tex.relu, imported_earlier.relu)
    assert all(torch.equal(function(X, None), X + 100) for function in functions)
    with tex.set_backend("torch"):
        assert all(torch.equal(function(X, None), X.relu()) for function in functions)
    assert all(torch.equal(function(X, None), X + 100) for function in functions)


def test_threads_agree_while_the_choice_changes(counting: Counter[str]) -> None:
    wrong: list[torch.Tensor] = []
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            y = relu(X, None)
            if not (torch.equal(y, X + 100) or torch.equal(y, X.relu())):
                wrong.append(y)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        with tex.set_backend("torch"):
            pass
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and torch.equal(relu(X, None), X + 100)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_the_same_backends_once_and_is_not_locked(counting: Counter[str]) -> None:
    relu(X, None)
    names = [backend.NAME for backend in registry.ordered()]
    with registry._lock:  # held by the parent at the moment of the fork
        child = os.fork()
        if child == 0:
            same = [backend.NAME for backend in registry.ordered()] == names
            with tex.set_backend("torch"):
                forced = torch.equal(relu(X[:1], None), X[:1].relu())
            os._exit(0 if same and forced and torch.equal(relu(X[:1], None), X[:1] + 100) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_failing_kernel_raises_its_own_error_once_and_nothing_else_is_tried(counting: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fails(self: object, input: torch.Tensor, quantizer: object) -> None:
        calls.append(input)
        raise ZeroDivisionError("mine")

    monkeypatch.setattr(Counting, "relu", fails)
    registry.changed()
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        relu(X, None)
    assert len(calls) == 1 and caught.value.__context__ is None


def test_handing_over_goes_to_the_next_in_order_and_not_back(counting: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: tex.TEXBackendBase, input: torch.Tensor, quantizer: object) -> object:
        return tex.hand_over(self, "relu", input, quantizer=quantizer)

    monkeypatch.setattr(Counting, "relu", refuses)
    registry.changed()
    assert torch.equal(relu(X, None), X.relu())
    with tex.set_backend("counting", strict=True), pytest.raises(NotImplementedError, match="counting: refuses this call"):
        relu(X, None)
