"""State of one thread, or of one asynchronous task: a policy entered by ``with``, and recorders of its tex calls.

All of it is one context variable, which is None unless there is such state; dispatch reads it once per call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import ref

from fusible.tex.selection.policy import Policy

__all__ = ["Carried", "Here", "Scope", "carried", "current_scope", "here", "update_here"]


class Scope:
    """A policy as a key of caches: compared by identity, one per policy in the registry, so that a policy entered again finds its choices made."""

    __slots__ = ("policy",)

    def __init__(self, policy: Policy) -> None:
        self.policy = policy


class _Pending(Protocol):
    def commit(self) -> None: ...


@dataclass(frozen=True)
class Here:
    """``entered``: the open ``with``s, each by its owner, the innermost last; it is in force. ``pending``: a change whose object was made here and
    may yet be entered; it lives as long as the caller keeps it. ``note``: whom dispatch tells of the calls made here."""

    entered: tuple[tuple[object, Scope], ...] = ()
    pending: ref[_Pending] | None = None
    note: Callable[[Any], None] | None = None

    @property
    def scope(self) -> Scope | None:
        return self.entered[-1][1] if self.entered else None


_NOTHING = Here()

here: ContextVar[Here | None] = ContextVar("fusible.tex", default=None)


def update_here(**changes: Any) -> None:
    """Change what holds here."""
    changed = replace(here.get() or _NOTHING, **changes)
    here.set(None if changed == _NOTHING else changed)


def current_scope() -> Scope | None:
    """The policy in force here alone, or None. A pending change that was not entered is settled first: this thread has gone on."""
    now = here.get()
    if now is None:
        return None
    if now.pending is not None:
        change = now.pending()
        update_here(pending=None)
        if change is not None:
            change.commit()
        return current_scope()
    return now.scope


class Carried:
    """A policy for work that torch may do later on a thread of its own: a backward pass on a GPU."""

    __slots__ = ("_scope", "_thread")

    def __init__(self, scope: Scope) -> None:
        self._scope, self._thread = scope, threading.get_ident()

    @contextmanager
    def along(self) -> Iterator[None]:
        """Let it be in force on another thread, unless one was entered there."""
        if self._thread == threading.get_ident() or current_scope() is not None:
            yield
            return
        update_here(entered=((self, self._scope),))
        try:
            yield
        finally:
            update_here(entered=())


def carried() -> Carried | None:
    """The policy in force where this is called, to be taken along; None where it is the process's own, which holds on every thread."""
    scope = current_scope()
    return None if scope is None else Carried(scope)
