"""Functions that hold what they are given against their annotations, and say of a call that failed which function it was.

What constructors do by ``fusible.tex.calls.constructors``, functions do here: the class of each argument is looked at before a call, and a sentence
that comes from within says of which function it speaks.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TypeVar

from fusible.errors import ArgumentError, FusibleError, NotServedError, expected, subject, with_owner
from fusible.tex.calls.argument_kinds import Kind, kind_of, shown
from fusible.tex.calls.call_text import CallText, compiled, set_defaults

__all__ = ["checked"]

F = TypeVar("F", bound=Callable[..., Any])


def checked(function: F, *, known: Mapping[str, Any], exact: Mapping[str, frozenset[type]], module: str) -> F:
    """``function``, which refuses arguments that are not of the kinds that its annotations say, before it begins, by ``DTypeError`` or
    ``ArgumentError``, and whose own errors name it. It belongs to ``module``.

    ``known``: the kinds that a room's annotations name (``kind_of``). ``exact``: by name classes whose instances are surely of that kind; of these a
    look at the class is all that a call costs (30 ns for each argument).
    """
    signature = inspect.signature(function)
    name = function.__name__
    kinds = {p.name: kind_of(p.annotation, known) for p in signature.parameters.values()}
    made: dict[str, Any] = {"_class": type, "_function": function}
    made |= {"_check": functools.partial(_check, name), "_tell": functools.partial(_tell, name, module)}
    source = _source(signature, name, {own: kind for own, kind in kinds.items() if kind is not None}, exact, made)
    file = f"{__file__}: {module}.{name}"
    call: Any = functools.update_wrapper(compiled(source, file, name, made), function)
    set_defaults(call, signature)
    call.__module__ = module
    return call


def _source(signature: inspect.Signature, name: str, kinds: Mapping[str, Kind], exact: Mapping[str, frozenset[type]], made: dict[str, Any]) -> str:
    """The text of the function, with its own parameters, so that Python binds and defaults a call."""
    tests = ""
    for p in signature.parameters.values():
        if p.name not in kinds:
            continue
        every = p.kind is p.VAR_POSITIONAL
        made[f"_{p.name}_kind"], made[f"_{p.name}_classes"] = kinds[p.name], _classes(p.annotation, exact)
        surely = p.name if every else f"_class({p.name}) not in _{p.name}_classes"
        loop = f"for _item in {p.name}: " if every else ""
        tests += f"    if {surely}:\n        {loop}_check({p.name!r}, {'_item' if every else p.name}, _{p.name}_kind)\n"
    text = CallText.of(signature)
    return f"""
def {name}({text.parameters}):
{tests}    try:
        return _function({text.arguments})
    except Exception as _error:
        _tell(_error, {{{text.by_name}}})
        raise
"""


def _classes(annotation: str, exact: Mapping[str, frozenset[type]]) -> frozenset[type]:
    """The classes whose instances need no further look; none of a kind that has more to it than a class."""
    parts = annotation.split(" | ")
    found = {"None": frozenset({NoneType}), **_PYTHONS, **exact}
    return frozenset().union(*(found.get(part, frozenset()) for part in parts))


_PYTHONS: dict[str, frozenset[type]] = {"bool": frozenset({bool}), "float": frozenset({float, int}), "int": frozenset({int}), "str": frozenset({str})}


def _check(function: str, argument: str, value: Any, kind: Kind) -> None:
    found = kind.wrong(value, argument)
    if found is not None:
        raise found.error(function)


def _tell(function: str, module: str, error: Exception, arguments: Mapping[str, Any]) -> None:
    """Let a sentence that comes from within say of which function it speaks. One of Python's own that came about in the room's code, and not in what
    the user has put into it, is of arguments that do not fit one another: raise what they are."""
    if isinstance(error, FusibleError):
        _name(function, error)
    elif isinstance(error, _OF_PYTHON) and _raised_in(error).startswith(module):
        got = ", ".join(f"{name} {_shown(value)}" for name, value in arguments.items())
        wanted = "arguments that fit one another, as documented"
        raise ArgumentError(expected(wanted, of=function, got=got, do=f"see help({module}.{function})")) from error


_OF_PYTHON = (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)


def _raised_in(error: Exception) -> str:
    """The module in whose code an error came about."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")) if trace is not None else ""


def _shown(value: Any) -> str:
    text = repr(value) if hasattr(value, "shape") and not hasattr(value, "device") else shown(value)
    return text if len(text) <= 80 and "\n" not in text else type(value).__qualname__


def _name(function: str, error: FusibleError) -> None:
    text = str(error)
    if re.search(rf"\b{function}\b", text):
        return
    if subject(text):
        error.args = (with_owner(text, function), *error.args[1:])
    elif isinstance(error, NotServedError):
        error.args = (f"{function}: {text}", *error.args[1:])
