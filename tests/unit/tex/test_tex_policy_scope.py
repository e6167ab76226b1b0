"""Whose policy holds where: a plain call's is the process's, a ``with``'s is that of its thread or task alone, whatever the others do meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusible
from fusible import tex
from fusible.errors import BackendError
from fusible.tex.selection.registry import registry
from fusible.tex.selection.scope import here

X = torch.randn(4, 6)
NAMES = ("first", "second")


def _backend(name: str, step: float) -> type[tex.TEXBackendBase]:
    return type(name, (tex.TEXBackendBase,), {"NAME": name, "relu": lambda self, input, quantizer: input + step})


@pytest.fixture(autouse=True)
def two_backends() -> Iterator[None]:
    before = registry.registered()
    tex.register_backend(_backend("first", 100.0))
    tex.register_backend(_backend("second", 200.0))
    policy = tex.get_policy()
    yield
    assert here.get() is None and tex.get_policy() == policy, "a test left its policy behind"
    registry.put_registered(before)


def _who() -> str:
    """Who serves here, by what is computed, by what is chosen and by what is in force: all must agree."""
    step = (tex.relu(X, None) - X)[0, 0].item()
    computed = {100.0: "first", 200.0: "second"}.get(round(step), "process")
    forced = tex.get_policy().forced
    chosen = tex.explain("relu", X, None).backend
    assert (forced or "process") == computed and (computed == "process" or chosen == computed == tex.get_backend().name)
    return computed


class _Worker:
    """A thread that does what it is told, step by step."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], Any]] = []
        self._told, self._did = threading.Semaphore(0), threading.Semaphore(0)
        self.result: Any = None
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while True:
            self._told.acquire()
            step = self._steps.pop(0)
            if step is _end:
                return
            try:
                self.result = step()
            except BaseException as error:
                self.result = error
            self._did.release()

    def do(self, step: Callable[[], Any]) -> Any:
        self._steps.append(step)
        self._told.release()
        assert self._did.acquire(timeout=60)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def close(self) -> None:
        self._steps.append(_end)
        self._told.release()
        self._thread.join()


def _end() -> None: ...


class _Scripted:
    """One participant: makes a change, enters it, computes, leaves it, computes; what it computes is its own or the process's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.change: Any = None
        self.steps = [self._make, self._enter, self._inside, self._leave, self._outside]

    def _make(self) -> None:
        self.change = tex.set_backend(self.name)

    def _enter(self) -> None:
        self.change.__enter__()

    def _inside(self) -> None:
        assert _who() == self.name

    def _leave(self) -> None:
        self.change.__exit__(None, None, None)

    def _outside(self) -> None:
        assert _who() == "process"


_ORDERS = [order for order in itertools.product((0, 1), repeat=10) if sum(order) == 5]


def test_two_threads_in_every_order_keep_their_policies_apart() -> None:
    """All 252 interleavings of making, entering, computing, leaving and computing in two threads; a third one computes after every step."""
    workers = (_Worker(), _Worker())
    try:
        for order in _ORDERS:
            scripts = [iter(_Scripted(name).steps) for name in NAMES]
            for who in order:
                workers[who].do(next(scripts[who]))
                assert _who() == "process", order
    finally:
        for worker in workers:
            worker.close()


def test_two_tasks_in_every_order_keep_their_policies_apart() -> None:
    """The same of two asynchronous tasks of one thread, which take turns in every order."""

    async def play(order: tuple[int, ...]) -> None:
        turns = [asyncio.Event(), asyncio.Event()]
        done = asyncio.Event()

        async def task(who: int) -> None:
            for step in _Scripted(NAMES[who]).steps:
                await turns[who].wait()
                turns[who].clear()
                step()
                done.set()

        tasks = [asyncio.create_task(task(who)) for who in (0, 1)]
        for who in order:
            turns[who].set()
            while not done.is_set() and not tasks[who].done():
                await asyncio.sleep(0)
            done.clear()
            assert _who() == "process", order
        for made in tasks:
            await made

    for order in _ORDERS:
        asyncio.run(play(order))


def test_threads_that_run_freely_see_nothing_of_one_another() -> None:
    """Four threads enter and leave without waiting for each other, switched as often as can be; a strict policy would make another's call fail."""
    wrong: list[Any] = []
    stop = threading.Event()

    entered: dict[str, int] = dict.fromkeys(NAMES, 0)

    def enters(name: str) -> None:
        try:
            while not stop.is_set():
                entered[name] += 1
                with tex.set_backend(name, strict=True):
                    if _who() != name:
                        wrong.append((name, "within"))
        except BaseException as error:
            wrong.append(error)

    def computes() -> None:
        try:
            while not stop.is_set():
                tex.gelu(X, None)
                if _who() != "process":
                    wrong.append("outside")
        except BaseException as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=enters, args=(name,)) for name in NAMES] + [threading.Thread(target=computes) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        while min(entered.values()) < 100 and not wrong:
            registry.changed()  # every choice is dropped meanwhile
            with tex.record():
                pass
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not wrong, wrong[:3]


def test_a_plain_call_is_the_processs_at_once() -> None:
    worker = _Worker()
    try:
        tex.set_backend("first")
        assert worker.do(_who) == _who() == "first"
        worker.do(lambda: tex.set_backend("second") and None)
        assert worker.do(_who) == _who() == "second"
        with tex.set_policy(relu="first"):
            assert (tex.relu(X, None) - X)[0, 0].round() == 100 and worker.do(_who) == "second"
    finally:
        tex.set_backend(None)
        worker.close()
    assert _who() == "process"


def test_an_object_that_is_kept_is_a_plain_call_once_its_thread_goes_on() -> None:
    worker = _Worker()
    try:
        kept = tex.set_backend("first")
        assert worker.do(_who) == "process"  # it may yet be entered
        assert _who() == "first" and worker.do(_who) == "first"
        with kept:  # from now on it is this thread's
            assert _who() == "first" and worker.do(_who) == "process"
        assert _who() == worker.do(_who) == "process"
        kept = tex.set_backend("second")
        del kept
        assert worker.do(_who) == _who() == "second"
        tex.set_backend(None)
        kept = tex.set_backend("first")
        kept.__exit__(None, None, None)  # never entered: what it changed is put back
        assert worker.do(_who) == _who() == "process"
    finally:
        tex.set_backend(None)
        worker.close()


def test_putting_back_leaves_what_others_changed_since() -> None:
    kept = tex.set_backend("first")
    assert _who() == "first"
    tex.set_backend("second")
    kept.__exit__(None, None, None)
    assert _who() == "second"
    tex.set_backend(None)


def test_changes_of_the_process_add_up_whoever_waits() -> None:
    kept = tex.set_backend("first")
    thread = threading.Thread(target=lambda: tex.set_policy(gelu="torch") and None)
    thread.start()
    thread.join()
    assert (tex.get_policy().forced, tex.get_policy().per_function) == ("first", {"gelu": "torch"})
    del kept
    tex.set_policy(tex.Policy())


def test_a_plain_call_within_a_with_ends_with_it() -> None:
    worker = _Worker()
    try:
        with tex.set_backend("first"):
            tex.set_backend("second")
            assert _who() == "second" and worker.do(_who) == "process"
            with tex.set_backend("first"):
                assert _who() == "first"
                tex.set_backend(None)
                assert _who() == "process"
            assert _who() == "second"
        assert _who() == "process"
    finally:
        worker.close()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_contexts_that_end_in_another_order_leave_nothing_behind(order: tuple[int, ...]) -> None:
    """Of generators and exit stacks in one thread: the innermost that is still open is in force."""
    changes = []
    names = ("first", "second", "first")
    for name in names:
        change = tex.set_backend(name)
        change.__enter__()
        changes.append(change)
    left = [0, 1, 2]
    for place in order:
        changes[place].__exit__(None, None, None)
        left.remove(place)
        assert _who() == (names[left[-1]] if left else "process")


def test_one_object_may_be_entered_twice_and_by_two_threads() -> None:
    change = tex.set_backend("first")
    worker = _Worker()
    try:
        with change, change:
            assert _who() == "first"
            worker.do(change.__enter__)
            assert worker.do(_who) == "first"
        assert _who() == "process" and worker.do(_who) == "first"
        worker.do(lambda: change.__exit__(None, None, None))
        assert worker.do(_who) == "process"
    finally:
        worker.close()


def test_errors_generators_stacks_and_copied_contexts() -> None:
    with pytest.raises(ZeroDivisionError), tex.set_backend("first"):
        raise ZeroDivisionError
    assert _who() == "process"
    with contextlib.ExitStack() as stack:
        stack.enter_context(tex.set_backend("first"))
        assert _who() == "first"
        copied = contextvars.copy_context()
    assert _who() == "process" and copied.run(_who) == "first"

    @contextlib.contextmanager
    def chosen() -> Iterator[None]:
        with tex.set_backend("second"):
            yield

    with chosen():
        assert _who() == "second"
    with tex.set_backend("first"), pytest.raises(BackendError, match="not found"):
        tex.set_backend("nobody")
    assert _who() == "process"


def test_a_with_that_cannot_be_entered_leaves_nothing_behind() -> None:
    change = tex.set_backend("second")
    registry.unregister_backend("second")
    with pytest.raises(BackendError, match="Backend 'second' not found"):
        change.__enter__()
    assert _who() == "process" and here.get() is None


def test_a_policy_entered_again_finds_its_choices_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with tex.set_backend("first"):
            tex.relu(X, None)
    tex.relu(X, None)
    epoch = registry.epoch
    monkeypatch.setattr(registry, "decide", None)
    for _ in range(3):
        with tex.set_backend("first"):
            assert (tex.relu(X, None) - X)[0, 0].round() == 100
        assert torch.equal(tex.relu(X, None), X.relu())
    assert registry.epoch == epoch


def test_many_policies_are_not_kept_for_ever() -> None:
    for number in range(200):
        with tex.set_policy(tex.Policy(per_function={"relu": ("first",) * (1 + number)})):
            assert (tex.relu(X, None) - X)[0, 0].round() == 100
    assert len(registry._scopes) <= 64


def test_a_replayed_pass_is_the_one_of_its_policy() -> None:
    """Two threads share a module: each replays the calls of its own policy, and neither drops the other's."""
    model = fusible.Sequential(fusible.ReLU(), fusible.ReLU())
    worker = _Worker()

    def step() -> float:
        x = torch.ones(2, 4, requires_grad=True)
        y = model(x)
        y.sum().backward()
        return y[0, 0].item()

    try:
        worker.do(tex.set_backend("first").__enter__)
        for _ in range(5):
            assert step() == 1 and worker.do(step) == 201
        epoch = registry.epoch
        replays = model._runner().executor._replays
        assert sum(replay is not None for replay in replays.values()) == len(replays) == 4 and registry.epoch == epoch
        assert all(replay.epoch == epoch for replay in replays.values())
    finally:
        worker.close()


def test_a_backward_pass_on_another_thread_takes_the_policy_of_its_forward() -> None:
    """As torch's own threads for a GPU do. A policy that is entered there is stronger."""
    calls: list[str] = []

    def spy(name: str) -> type[tex.TEXBackendBase]:
        def drelu(self: Any, grad: Any, fwd_input: Any, quantizer: Any) -> Any:
            calls.append(name)
            return grad

        return type(name, (tex.TEXBackendBase,), {"NAME": name, "drelu": drelu})

    for name in ("third", "fourth"):
        tex.register_backend(spy(name))
    model = fusible.Sequential(fusible.ReLU())
    worker = _Worker()
    try:
        for repeat in range(4):
            x = torch.randn(2, 4, requires_grad=True)
            with tex.set_backend("third"):
                y = model(x).sum()
            worker.do(lambda y=y: y.backward(retain_graph=True))
            assert calls == ["third"], repeat
            with tex.set_backend("fourth"):
                y.backward()
            assert calls == ["third", "fourth"], repeat
            calls.clear()
    finally:
        worker.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_goes_on_with_the_policy_of_its_thread() -> None:
    with tex.set_backend("first"):
        child = os.fork()
        if child == 0:
            within = _who() == "first"
            with tex.set_backend("second"):
                deeper = _who() == "second"
            os._exit(0 if within and deeper and _who() == "first" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert _who() == "first"


def test_the_policy_of_the_process_may_change_while_others_compute() -> None:
    wrong: list[Any] = []
    stop = threading.Event()

    done = [0]

    def computes() -> None:
        while not stop.is_set():
            done[0] += 1
            step = round((tex.relu(X, None) - X)[0, 0].item())
            if step not in (100, 200):
                wrong.append(step)

    tex.set_backend("first")
    threads = [threading.Thread(target=computes) for _ in range(2)]
    for thread in threads:
        thread.start()
    number = 0
    while done[0] < 500 or number < 60:
        tex.set_backend(NAMES[number % 2])
        number += 1
    stop.set()
    for thread in threads:
        thread.join()
    tex.set_backend(None)
    assert not wrong, wrong[:3]
