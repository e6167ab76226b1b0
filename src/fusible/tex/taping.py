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
    heard: list[Heard] | None = None


local = _Local()
"""``local.heard``: where dispatch notes the calls of this thread, or None."""


@contextmanager
def listening() -> Iterator[list[Heard]]:
    """Note every tex call that this thread makes in the body."""
    former, local.heard = local.heard, []
    try:
        yield local.heard
    finally:
        local.heard = former
