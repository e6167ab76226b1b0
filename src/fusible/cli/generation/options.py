"""Mistakes of the Python API, said of the options of a command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fusible.errors import ArgumentError, subject

__all__ = ["named_as_options"]


@contextmanager
def named_as_options() -> Iterator[None]:
    """Errors about the argument ``top_k`` are about ``--top-k``."""
    try:
        yield
    except ArgumentError as error:
        text = str(error)
        if error.argument is None or subject(text) != error.argument:
            raise
        raise ArgumentError(text.replace(error.argument, f"--{error.argument.replace('_', '-')}", 1)) from None
