"""A fork while other threads hold locks: the child, which lacks those threads, can do everything."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import fusible
from fusible import lazy, tex
from fusible.errors import ForkError
from fusible.locks import _LOCKS, Lock
from fusible.pytorch import ops

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

LIMIT = 60.0
"""Seconds that a child may take for what takes some milliseconds."""


@pytest.fixture(autouse=True)
def one_thread_per_kernel() -> Iterator[None]:
    """A child must not wait for the threads of torch's own kernels, which it lacks too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def a_pass(model: torch.nn.Module, rows: int = 4) -> None:
    with fusible.autocast(recipe=fusible.DelayedScaling(amax_history_len=rows)):
        y = model(torch.ones(rows, 16, requires_grad=True))
    y.sum().backward()


def _ran_in_child(work: Callable[[], None]) -> str:
    """Why ``work`` did not end well in a forked child; empty where it did."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where there are threads, which is what is tested
        child = os.fork()
    if child == 0:
        told = "did not return"
        try:
            work()
            told = ""
        except BaseException:
            told = traceback.format_exc()
        finally:
            os.write(writer, told.encode())
            os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + LIMIT
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            os.close(reader)
            return "waits for ever"
        time.sleep(0.005)
    with os.fdopen(reader) as told_by_child:
        return told_by_child.read()


def _held_while(lock: Lock, work: Callable[[], str]) -> str:
    """What ``work`` gives while another thread holds ``lock``."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(LIMIT)
    try:
        return work()
    finally:
        done.set()
        thread.join()


def _owner(lock: Lock) -> str:
    """Who has a lock, for messages: the modules and objects that refer to it."""
    found = []
    for referrer in gc.get_referrers(lock):
        if isinstance(referrer, dict):
            found.append(str(referrer.get("__name__", [name for name, value in referrer.items() if value is lock])))
        else:
            found.append(type(referrer).__qualname__)
    return ", ".join(found)


def test_whichever_lock_another_thread_holds_a_child_does_a_full_pass() -> None:
    """Planning, running, registering, choosing backends, recording; and what a child cannot do, compiled execution, it refuses at once."""
    model = fusible.Sequential(fusible.Linear(16, 16), fusible.GELU(), fusible.Linear(16, 16))
    operations = ops.Sequential(ops.Linear(16, 16), ops.GELU())
    compiled = fusible.Sequential(fusible.Linear(16, 16)).compile("xla") if _has_engine() else None
    models = [model, operations, *([compiled] if compiled is not None else [])]
    for each in models:
        a_pass(each)

    def everything() -> None:
        a_pass(model)
        a_pass(operations)
        a_pass(model, rows=7)  # another plan, by another recipe
        with tex.set_policy(tex.get_policy()), tex.record() as calls:
            a_pass(fusible.Sequential(fusible.Linear(16, 8)), rows=5)
        assert calls
        lazy.rand((2, 2))
        if compiled is not None:
            with pytest.raises(ForkError):
                a_pass(compiled, rows=9)

    locks = list(_LOCKS)
    assert len(locks) >= 15
    failed = {_owner(lock): why for lock in locks if (why := _held_while(lock, lambda: _ran_in_child(everything)))}
    assert not failed


def _has_engine() -> bool:
    try:
        import jaxlib  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def test_children_of_a_process_whose_threads_are_in_passes() -> None:
    """Without gradients: torch's own autograd engine has locks too, for which a child of torch's own modules waits for ever as well, now and then."""
    model = fusible.Sequential(fusible.Linear(16, 16), fusible.Linear(16, 16))
    a_pass(model)
    stop = threading.Event()

    def infer() -> None:
        with torch.no_grad(), fusible.autocast(recipe=fusible.DelayedScaling()):
            model(torch.ones(4, 16))

    def work() -> None:
        while not stop.is_set():
            infer()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        failed = [why for why in (_ran_in_child(infer) for _ in range(20)) if why]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed


def test_a_lock_that_the_forking_thread_holds_stays_held() -> None:
    lock = Lock()

    def others_wait() -> None:
        with lock:
            got_in = threading.Event()
            thread = threading.Thread(target=lambda: _enter(lock, got_in), daemon=True)
            thread.start()
            assert not got_in.wait(0.05)
        _left()
        assert got_in.wait(LIMIT)

    def _left() -> None:
        """The block of the parent's own ``with`` is left too, as it would be there."""
        lock.__exit__(None, None, None)

    with lock:
        assert _ran_in_child(others_wait) == ""


def _enter(lock: Lock, got_in: threading.Event) -> None:
    with lock:
        got_in.set()
