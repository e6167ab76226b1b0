"""The end of processes that have had process groups."""

from __future__ import annotations

import atexit
import gc
import time

from fusible.machine import thread_names

__all__ = ["end_in_order", "let_threads_end"]

_DROPPING = 0.1
"""Seconds: a thread that has its turn drops what it holds in microseconds."""


def end_in_order() -> None:
    """See that ``let_threads_end`` is called before the interpreter is taken down. Once is enough, and more does nothing."""
    atexit.unregister(let_threads_end)
    atexit.register(let_threads_end)


def let_threads_end() -> None:
    """Let the threads of gloo drop the tensors of what has just been sent.

    One that does so while the interpreter is taken down is ended by it, and the whole process aborts, with all of its work done. Threads end with the
    last that holds their group: cycles of objects, which are collected here; but tensors on a mesh (torch 2.13) keep its group for good.
    """
    gc.collect()
    names = thread_names()
    if names is None or any("gloo" in name for name in names):
        time.sleep(_DROPPING)
