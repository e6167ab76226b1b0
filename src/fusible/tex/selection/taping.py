"""Listening to the tex calls of one thread: what was called with what, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fusible.errors import check_callable
from fusible.tex.selection.scope import here, update_here

__all__ = ["RecordedCall", "listening"]


class RecordedCall(NamedTuple):
    """One call: the chosen backend's method, its arguments, and its result."""

    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


@contextmanager
def listening(note: Callable[[RecordedCall], None]) -> Iterator[None]:
    """Tell ``note`` of every tex call that this thread makes in the body, once it is done. Its tensors live no longer for it."""
    check_callable(note, "note of listening")
    now = here.get()
    former = now.note if now is not None else None
    update_here(note=note)
    try:
        yield
    finally:
        update_here(note=former)
