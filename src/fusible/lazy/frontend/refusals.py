"""The sentences for a call that failed: they name the function, and the argument that is not of its annotated type."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from fusible.errors import ArgumentError, DTypeError, FusibleError, expected, subject, with_owner
from fusible.lazy.locate import pointing
from fusible.lazy.printing import shown

__all__ = ["OF_PYTHON", "Refusals"]

OF_PYTHON = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that Python raises where a value is of an unexpected type."""


def _is_int(x: Any) -> bool:
    return hasattr(x, "__index__")


def _is_number(x: Any) -> bool:
    return not isinstance(x, str) and (hasattr(x, "__float__") or hasattr(x, "__index__"))


def _is_list(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, list | tuple) and all(map(of, x))


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "Callable[..., Any]": ("a function or a module", callable),
    "Sequence[str]": ("a list of texts", _is_list(lambda x: isinstance(x, str))),
    "bool": ("True or False", lambda x: isinstance(x, bool | int) or type(x).__name__ in ("bool_", "bool")),
    "float": ("a number", _is_number),
    "float | None": ("a number or None", lambda x: x is None or _is_number(x)),
    "float | bool": ("a number", _is_number),
    "int": ("an integer", _is_int),
    "int | None": ("an integer or None", lambda x: x is None or _is_int(x)),
    "Sequence[int]": ("a list of integers", _is_list(_is_int)),
    "Sequence[int] | None": ("a list of integers or None", lambda x: x is None or _is_list(_is_int)(x)),
    "Sequence[Sequence[int]]": ("a list of pairs of integers", _is_list(_is_list(_is_int))),
    "Sequence[Sequence[int]] | None": ("a list of pairs of integers or None", lambda x: x is None or _is_list(_is_list(_is_int))(x)),
    "str": ("a text", lambda x: isinstance(x, str)),
    "str | None": ("a text or None", lambda x: x is None or isinstance(x, str)),
    "device": ("a device", lambda x: type(x).__name__ == "device"),
}
"""By annotation what an argument must be, in words, and whether a value is that."""


class Refusals:
    """The sentences of one function."""

    def __init__(self, function: str, signature: inspect.Signature) -> None:
        self.function = function
        self.names = {function, *signature.parameters}
        self.calls = any(p.annotation == "Callable[..., Any]" for p in signature.parameters.values())
        self.kinds = {p.name: _KINDS[p.annotation] for p in signature.parameters.values() if p.annotation in _KINDS}

    def name(self, error: FusibleError) -> None:
        """Add the function to a sentence that names neither it nor one of its arguments.

        An error that a function of the user's raised, which this one calls, stays as it is.
        """
        if self.calls and error.located:
            return
        of = subject(str(error))
        if of and "'" not in of and self.names.isdisjoint(re.findall(r"\w+", of)):
            error.args = (with_owner(str(error), self.function), *error.args[1:])

    def flag(self, parameter: str, value: Any) -> None:
        """Raise ``DTypeError`` for a value that is neither True nor False: Python would accept any value as one of them."""
        if not self.kinds[parameter][1](value):
            raise self._refused(parameter, value)

    def explain(self, error: Exception, arguments: Mapping[str, Any]) -> FusibleError | None:
        """The error to raise in place of one of Python's own; ``None`` where it was raised by code of the user's."""
        wrong = next((name for name, (_, accepts) in self.kinds.items() if not accepts(arguments[name])), None)
        if wrong is not None:
            return self._refused(wrong, arguments[wrong])
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is None or not str(trace.tb_frame.f_globals.get("__name__")).startswith("fusible.lazy"):
            return None
        got = ", ".join(f"{name} {shown(value)}" for name, value in arguments.items())
        of, do = self.function, f"see help(fusible.lazy.{self.function})"
        return ArgumentError(expected("arguments that fit one another, as documented", of=of, got=got, do=do))

    def _refused(self, parameter: str, value: Any) -> DTypeError:
        error = DTypeError(expected(self.kinds[parameter][0], of=f"{parameter} of {self.function}", got=shown(value), do="pass one"))
        return pointing(error, parameter)
