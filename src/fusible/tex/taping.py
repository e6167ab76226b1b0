"""Listening to the tex calls of one thread: what was called with what, and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["Heard", "listening", "local"]


class Heard(NamedTuple):
    """One call: the chosen backend's method, its arguments, and its result."""

    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _Local(threading.local):
    note: Callable[[Heard], None] | None = None


local = _Local()
"""``local.note``: whom dispatch tells of the calls of this thread, or None."""


@contextmanager
def listening(note: Callable[[Heard], None]) -> Iterator[None]:
    """Tell ``note`` of every tex call that this thread makes in the body, once it is done. Its tensors live no longer for it."""
    former, local.note = local.note, note
    try:
        yield
    finally:
        local.note = former
