"""Writes that happen together or not at all, wherever a ``KeyboardInterrupt`` or another asynchronous exception comes.

Python delivers these between bytecodes. So whatever changes tensors in several places prepares its writes as calls of functions written in C, and
``run`` makes them all from within C: nothing is delivered on the way. A kernel hands its writes to ``commit``, which runs them, or leaves them to
``gathered`` where that has called it.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

__all__ = ["Write", "commit", "gathered", "run"]

Write = partial[Any]
"""A call of a function written in C, which fails only where it could have been told before."""

_open: ContextVar[list[Write] | None] = ContextVar("open", default=None)


def gathered(function: Callable[[], Iterable[Write]]) -> list[Write]:
    """The writes of the kernels that ``function`` calls, which are yet to be run, and after them those that it returns.

    Of kernels, those of the backends ``cpu`` and ``torch`` that move optimizers on take part; others write when they are called.
    """
    # Left by C as it is entered: an interrupt on the way into or out of a with statement would leave kernels that never write.
    return copy_context().run(_gather, function)


def _gather(function: Callable[[], Iterable[Write]]) -> list[Write]:
    writes: list[Write] = []
    _open.set(writes)
    after = function()
    return [*writes, *after]


def commit(writes: Iterable[Write]) -> None:
    """Make the writes now, or leave them to ``gathered``."""
    into = _open.get()
    if into is None:
        run(writes)
    else:
        into += writes


def run(writes: Iterable[Write]) -> None:
    """Make the writes, one after another, with no bytecode between them."""
    deque(map(operator.call, writes), maxlen=0)
