"""What a backend's class must be to be registered: a mistake in it raises here, not as a method that is never called or is called wrongly."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator
from inspect import Parameter
from types import MethodType
from typing import Any

from fusible.errors import BackendError, expected
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Declaration
from fusible.tex.selection.policy import KINDS_OF_BACKENDS

__all__ = ["admitted", "check_method", "nearest"]

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def admitted(cls: type[TEXBackendBase]) -> TEXBackendBase:
    """A backend of the class ``cls``. Raises ``BackendError`` unless all of its public methods can be served.

    Every public method is a function of tex, one of ``TEXBackendBase``'s own, or named in ``HELPERS``; and a function's method takes what the
    function is declared with.
    """
    if not (isinstance(cls, type) and issubclass(cls, TEXBackendBase)):
        raise BackendError(expected("a subclass of tex.TEXBackendBase", of="a backend", got=repr(cls), do="derive the class from it"))
    _check_attributes(cls)
    helpers = frozenset[str]().union(*(vars(base).get("HELPERS", ()) for base in cls.__mro__))
    for owner, name, value in _own(cls):
        if name.isupper():
            _check_misspelt_attribute(cls, name)
        elif _is_method(value) and not hasattr(TEXBackendBase, name) and name not in helpers:
            do = "begin a helper's name with an underscore, or name it in HELPERS"
            raise _refused(cls, "public methods that tex has", f"{owner.__qualname__}.{name}{nearest(name)}", do)
    backend = cls()
    for name, declaration in DECLARATIONS.items():
        if name in vars(backend) or getattr(cls, name) is not getattr(TEXBackendBase, name):
            check_method(declaration, getattr(backend, name), cls.NAME)
    return backend


def check_method(declaration: Declaration, method: object, backend: str) -> None:
    """Raise ``BackendError`` unless ``method``, bound to its backend, takes a call of ``declaration``: its parameters by name and in order, and no
    other one. Parameters may be gathered by ``*args`` and ``**kwargs``."""
    got = _misfit(declaration, method)
    if got is not None:
        what, do = f"the parameters of {declaration.name}{declaration.signature}", "name the parameters as declared, in their order"
        raise BackendError(expected(what, of=f"{backend}'s method {declaration.name}", got=got, do=do))


def _misfit(declaration: Declaration, method: object) -> str | None:
    if not callable(method):
        return f"{method!r}"
    try:
        taken = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # a function written in C may not say
        return "no parameter self" if isinstance(method, MethodType) else None
    wanted = declaration.signature.parameters
    gathers = {p.kind for p in taken if p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}
    named = [p for p in taken if p.kind not in gathers]
    unknown = [p.name for p in named if p.name not in wanted]
    missing = [p.name for p in wanted.values() if not _takes(p, named, gathers)]
    order = [p.name for p in named if p.kind in _BY_POSITION]
    if unknown:
        return f"a parameter {unknown[0]}, which the function lacks"
    if missing:
        return f"none that takes {missing[0]}"
    if order != [name for name, p in wanted.items() if p.kind in _BY_POSITION][: len(order)]:
        return f"the order {', '.join(order)}"
    return None


def _takes(wanted: Parameter, named: list[Parameter], gathers: set[Any]) -> bool:
    """Whether a method takes the declared parameter in the way in which dispatch passes it: by position, or by name where that is its only way."""
    own = next((p for p in named if p.name == wanted.name), None)
    if wanted.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
        return wanted.kind in gathers
    if wanted.kind is Parameter.KEYWORD_ONLY:
        return own.kind is not Parameter.POSITIONAL_ONLY if own is not None else Parameter.VAR_KEYWORD in gathers
    return own.kind in _BY_POSITION if own is not None else Parameter.VAR_POSITIONAL in gathers


def nearest(name: str) -> str:
    """`` (do you mean rmsnorm_fwd?)``: the function or method that ``name`` may be a misspelling of, or nothing where none is near."""
    near = difflib.get_close_matches(name, [*DECLARATIONS, *_protocol()], n=1, cutoff=0.6)
    return f" (do you mean {near[0]}?)" if near else ""


def _protocol() -> list[str]:
    return [name for name in dir(TEXBackendBase) if not name.startswith("_") and name not in DECLARATIONS]


def _own(cls: type) -> Iterator[tuple[type, str, Any]]:
    """What ``cls`` adds to ``TEXBackendBase``, with the class that has it."""
    for owner in cls.__mro__:
        if owner not in TEXBackendBase.__mro__:
            yield from ((owner, name, value) for name, value in vars(owner).items() if not name.startswith("_"))


def _is_method(value: object) -> bool:
    return not isinstance(value, type | property) and (callable(value) or isinstance(value, staticmethod | classmethod))


def _refused(cls: type, what: str, got: str, do: str) -> BackendError:
    return BackendError(expected(what, of=f"the backend {cls.__qualname__}", got=got, do=do))


def _check_attributes(cls: type[TEXBackendBase]) -> None:
    if not isinstance(cls.NAME, str) or not cls.NAME:
        raise BackendError(expected("a NAME", of=f"the backend {cls.__qualname__}", got="none", do="set the class attribute NAME"))
    if not _NAME.fullmatch(cls.NAME):
        raise _refused(cls, "a NAME of letters, digits, '_', '.' and '-'", repr(cls.NAME), "choose another name")
    if cls.KIND not in KINDS_OF_BACKENDS:
        raise _refused(cls, f"one of {', '.join(KINDS_OF_BACKENDS)} as KIND", repr(cls.KIND), "leave it out for a vendor's backend")
    if not isinstance(cls.VENDOR, str):
        raise _refused(cls, "a string as VENDOR", repr(cls.VENDOR), "set the class attribute VENDOR")
    priority = cls.PRIORITY
    if not isinstance(priority, int | float) or priority != priority:
        raise _refused(cls, "a number as PRIORITY", repr(priority), "set the class attribute PRIORITY")
    if cls.DEVICES is not None and not (isinstance(cls.DEVICES, frozenset | set) and all(isinstance(device, str) for device in cls.DEVICES)):
        raise _refused(cls, "a set of device kinds or None as DEVICES", repr(cls.DEVICES), 'write frozenset({"cuda"})')


def _check_misspelt_attribute(cls: type, name: str) -> None:
    known = [attribute for attribute in _protocol() if attribute.isupper()]
    near = [] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    if near:
        raise _refused(cls, "attributes that tex reads", f"{name} (do you mean {near[0]}?)", "write it so, or begin its name with an underscore")
