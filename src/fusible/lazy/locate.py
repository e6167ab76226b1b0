"""Errors that begin with the user's line."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from fusible.errors import FusibleError
from fusible.lazy.source import excerpt, user_frame

__all__ = ["locate", "pointing", "shows_user"]

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound=FusibleError)


def pointing(error: E, argument: str) -> E:
    """``error``, with the carets under the user's line to stand under ``argument``."""
    error.argument = argument
    return error


def locate(error: FusibleError, parameters: tuple[str, ...]) -> None:
    """Put the user's line, with carets under the argument that ``error`` names, before its sentence. Once: outer callers leave it alone.

    ``parameters`` are those of the function that raised. Where its caller is not the user's code, but Fusible on behalf of the user, the whole call
    is marked.
    """
    caller = sys._getframe(1).f_back
    frame = user_frame(caller)
    if frame is None or error.located:
        return
    argument = error.argument if frame is caller else None
    text = excerpt((frame.f_code, frame.f_lasti), argument, parameters, {**frame.f_globals, **frame.f_locals})
    error.args = (f"{text}\n{error}",)
    error.located = True


def shows_user(function: F) -> F:
    """``function``, whose errors begin with the user's line. Of an ``__init__``, ``self`` is no argument of that line."""
    parameters = tuple(inspect.signature(function).parameters)[function.__name__ == "__init__" :]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except FusibleError as error:
            locate(error, parameters)
            raise

    return call  # type: ignore[return-value]
