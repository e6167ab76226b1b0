"""The lock of everything that threads share here: one that a forked child can take, and that an interrupt does not leave held."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

__all__ = ["Lock"]

if TYPE_CHECKING:

    class _Native:
        """What the interpreter's lock has, which a type checker takes for a class that has no subclasses."""

        def __enter__(self) -> bool: ...
        def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
        def release(self) -> None: ...
        def _is_owned(self) -> bool: ...
        def _at_fork_reinit(self) -> None: ...

else:
    _Native = type(threading.RLock())


class Lock(_Native):
    """``with Lock():``, as ``threading.RLock``; but in a forked child it is free, unless the thread that forked holds it.

    A child has the thread that forked alone. A lock that another one held at that moment would never be given back there, and what this package does
    next would wait for ever. So each lock is made anew in the child. What it guards is found as the other thread had it: nothing that is guarded may
    be wrong between two statements, so a state of several parts is one value, which is assigned once.

    It is the interpreter's own lock and no wrapper of one. A signal's handler, which may raise ``KeyboardInterrupt``, runs between two steps of
    Python code: in a method ``__enter__`` of ours that would be after the lock was taken and before the with block that gives it back. Entering a
    native lock is one step. For the same reason it is taken by ``with`` alone.
    """

    __slots__ = ()

    def __init__(self) -> None:
        _LOCKS.add(self)


_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _LOCKS:
        if not lock._is_owned():  # else the thread that forked holds it, whose with block goes on here
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
