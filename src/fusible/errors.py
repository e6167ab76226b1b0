"""Exceptions, and the one form that every message takes.

A message is a single sentence with four parts: its subject, what was expected of it, what came instead,
and what to do about it. ``expected`` builds that sentence, so that no call site invents its own.
"""

from __future__ import annotations

import math
import os
from numbers import Integral

__all__ = [
    "ArgumentError",
    "BackendError",
    "CheckpointError",
    "CompileError",
    "DTypeError",
    "ExecutionError",
    "FileError",
    "ForkError",
    "FusibleError",
    "KnobError",
    "MissingFileError",
    "MissingModuleError",
    "MissingNameError",
    "NotServedError",
    "OutOfRangeError",
    "ShapeError",
    "ValuesError",
    "check_callable",
    "check_class",
    "check_integer",
    "check_number",
    "check_path",
    "check_switch",
    "check_text",
    "expected",
    "subject",
    "with_owner",
]


def expected(what: str, *, of: str, got: object, do: str) -> str:
    """The sentence of an error: ``{of}: expected {what}, got {got}; {do}.`` It is one line, however many the values in it would take."""
    return " ".join(f"{of}: expected {what}, got {got}; {do.rstrip('.')}.".splitlines())


def subject(text: str) -> str:
    """Of what the sentence that ``expected`` made speaks, the user's line before it aside; "" of another text."""
    before, mark, _ = text.partition(": expected ")
    return before.rpartition("\n")[2] if mark else ""


def with_owner(text: str, owner: str) -> str:
    """The sentence with "of ``owner``" added to its subject, where code that serves several functions has raised it."""
    return text.replace(": expected ", f" of {owner}: expected ", 1)


def check_number(value: float, of: str, *, least: float | None = None, below: float | None = None) -> None:
    """Raise ``ArgumentError`` unless ``value`` is a finite number, of at ``least`` that and ``below`` that, ``DTypeError`` unless it is a number."""
    bounds = [text for bound, text in ((least, f"at least {least:g}" if least is not None else ""), (below, f"below {below}")) if bound is not None]
    wanted = "a finite number" + (f" of {' and '.join(bounds)}" if bounds else "")
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise DTypeError(expected(wanted, of=of, got=repr(value), do="pass such a number"))
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several numbers, or of complex ones
        raise DTypeError(expected(wanted, of=of, got=f"a {type(value).__name__} that is none", do="pass such a number")) from error
    if not (math.isfinite(number) and (least is None or number >= least) and (below is None or number < below)):
        raise ArgumentError(expected(wanted, of=of, got=value, do="pass such a number"))


def check_integer(value: object, of: str, *, least: int) -> None:
    """Raise ``DTypeError`` unless ``value`` is an integer, which True is not, ``ArgumentError`` unless it is at ``least`` that."""
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not integer or int(value) < least:  # pyright: ignore[reportArgumentType]
        error = ArgumentError if integer else DTypeError
        raise error(expected(f"an integer of at least {least}", of=of, got=_short(value), do="pass one"))


def check_callable(value: object, of: str, *, optional: bool = False) -> None:
    """Raise ``DTypeError`` unless ``value`` can be called, or is None where that is ``optional``."""
    if not callable(value) and not (optional and value is None):
        raise DTypeError(expected("a function" + " or None" * optional, of=of, got=_short(value), do="pass one"))


def check_class(value: object, of: str) -> None:
    """Raise ``DTypeError`` unless ``value`` is a class."""
    if not isinstance(value, type):
        raise DTypeError(expected("a class", of=of, got=_short(value), do="pass the class itself"))


def check_switch(value: object, of: str, *, optional: bool = False) -> None:
    """Raise ``DTypeError`` unless ``value`` is True or False, or None where that is ``optional``."""
    if not isinstance(value, bool) and not (optional and value is None):
        raise DTypeError(expected("True or False" + " or None" * optional, of=of, got=_short(value), do="pass one of these"))


def check_text(value: object, of: str, *, optional: bool = False) -> None:
    """Raise ``DTypeError`` unless ``value`` is a text, or is None where that is ``optional``."""
    if not isinstance(value, str) and not (optional and value is None):
        raise DTypeError(expected("a text" + " or None" * optional, of=of, got=_short(value), do="pass one"))


def check_path(value: object, of: str) -> None:
    """Raise ``DTypeError`` unless ``value`` is the path of a file."""
    if not isinstance(value, str | os.PathLike):
        raise DTypeError(expected("a file's path", of=of, got=_short(value), do="pass a str or a Path"))


def _short(value: object) -> str:
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else f"a {type(value).__qualname__}"


class FusibleError(Exception):
    """Base of every exception that Fusible raises on purpose.

    ``argument`` names the parameter that is wrong, where the raiser knows it: what shows the user's line then points at it. ``located`` says
    that the message begins with that line.
    """

    argument: str | None = None
    located: bool = False


class _WrongArgument(FusibleError, ValueError, TypeError, RuntimeError, AssertionError):
    """An argument is not what it must be. Torch and NVIDIA's package tell of one and the same mistake now by one of the four, now by another: a
    client's ``except`` clause that is written for one of theirs catches ours, whichever it names."""


class ArgumentError(_WrongArgument):
    """An argument has an illegal value."""


class OutOfRangeError(ArgumentError, IndexError):
    """An index names no place of a list."""


class ShapeError(ArgumentError):
    """A tensor has the wrong rank, width or number of elements."""


class ValuesError(FusibleError, ValueError, RuntimeError):
    """An operation cannot have the values of a quantized tensor. This is no TypeError, which Python's operators take for "not implemented" and
    replace by a sentence of their own."""


class DTypeError(_WrongArgument):
    """A tensor or an argument has the wrong type."""


class BackendError(FusibleError, RuntimeError, ValueError):
    """A backend is unknown, unavailable, or refused as a choice."""


class NotServedError(_WrongArgument, NotImplementedError):
    """No backend serves a call; the message lists the reason of each."""


class CompileError(FusibleError, RuntimeError):
    """Lowering or compiling a recorded program failed."""


class ExecutionError(FusibleError, RuntimeError):
    """A compiled program failed while it ran."""


class ForkError(FusibleError, RuntimeError):
    """Something that cannot live in a forked child was asked of one."""


class CheckpointError(FusibleError, ValueError, RuntimeError):
    """A checkpoint is truncated, altered, or belongs to another model."""


class MissingFileError(CheckpointError, FileNotFoundError):
    """There is no file of the name that was to be read."""


class FileError(FusibleError, OSError):
    """A file cannot be written: there is no room for it, or no permission."""


class KnobError(FusibleError, ValueError):
    """An environment variable has a value that cannot be read."""


class MissingModuleError(FusibleError, ModuleNotFoundError):
    """A module was imported by another package's name, under which Fusible has none."""


class MissingNameError(FusibleError, AttributeError):
    """Another package's module, as Fusible shows it, has no such name."""
