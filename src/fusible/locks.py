"""The lock of everything that threads share here: one that a forked child can take."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

__all__ = ["Lock"]


class Lock:
    """``with Lock():``, as ``threading.RLock``; but in a forked child it is free, unless the thread that forked holds it.

    A child has the thread that forked alone. A lock that another one held at that moment would never be given back there, and what this package does
    next would wait for ever. So each lock is made anew in the child. What it guards is found as the other thread had it: nothing that is guarded may
    be wrong between two statements, so a state of several parts is one value, which is assigned once.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _LOCKS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()


_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _LOCKS:
        if lock._lock.acquire(blocking=False):
            lock._lock.release()  # free, or held by the thread that forked, whose with block goes on here
        else:
            lock._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
