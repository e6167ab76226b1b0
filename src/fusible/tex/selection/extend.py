"""New functions from outside the package: declared to tex, and implemented for backends that are already there.

    @tex.declare("input", "quantizer")
    def awesomelu(input, quantizer):
        \"\"\"``x * sigmoid(x + 1)``.\"\"\"

    @tex.implement(awesomelu, backend="torch")
    def awesomelu_torch(backend, input, quantizer): ...

``awesomelu`` is then called, chosen, explained and recorded like any function of the interface.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple, TypeVar

from fusible.errors import ArgumentError, DTypeError, check_callable, expected
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Declaration, binds_by_name, unserved_method
from fusible.tex.selection.backend_checks import check_method, nearest
from fusible.tex.selection.dispatch import dispatcher
from fusible.tex.selection.registry import registry

__all__ = ["declare", "implement", "undeclare", "unimplement"]

F = TypeVar("F", bound=Callable[..., Any])

_DECLARED: dict[str, tuple[str, str]] = {}
"""The functions from outside the package, each with the module and the name of what declared it."""


class _Place(NamedTuple):
    """Where ``implement`` has put a method: the class of a backend, and the name of a function."""

    backend: type[TEXBackendBase]
    name: str


_FORMER: dict[_Place, Any] = {}
"""What the class had there before, None where it had nothing of its own."""


def _check_function(function: object, of: str) -> str:
    """The name of a function. Raises ``DTypeError`` for what is none."""
    check_callable(function, of)
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        raise DTypeError(expected("a function with a name", of=of, got=f"a {type(function).__qualname__}", do="write it with def"))
    return name


def declare(*asks: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function to tex: the decorated one gives name, signature and documentation; its body is not used.

    ``asks`` names the parameters (without defaults) whose kinds decide the choice of a backend. Returns the dispatching function. Raises
    ``ArgumentError`` where tex has the name already or ``asks`` names no such parameter. A function that its module defines anew takes the place of
    the former one, without what implemented that.
    """

    for ask in asks:
        if not isinstance(ask, str):
            raise ArgumentError(expected("names of parameters", of="asks of declare", got=type(ask).__qualname__, do="pass texts"))

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        _check_function(function, "what declare decorates")
        name, signature = function.__name__, inspect.signature(function)
        origin = function.__module__, getattr(function, "__qualname__", name)
        if hasattr(TEXBackendBase, name) and _DECLARED.get(name) != origin:
            raise ArgumentError(expected("a new name", of="a function declared to tex", got=repr(name), do="choose another one"))
        for ask in asks:
            if ask not in signature.parameters or signature.parameters[ask].default is not inspect.Parameter.empty:
                of = f"the deciding arguments of {name}"
                raise ArgumentError(expected("parameters without defaults", of=of, got=repr(ask), do="name a parameter"))

        if name in _DECLARED:
            _forget(name)
        _DECLARED[name] = origin
        declaration = DECLARATIONS[name] = Declaration(name, signature, asks, inspect.getdoc(function) or "")
        setattr(TEXBackendBase, name, unserved_method(declaration))
        return dispatcher(declaration)

    return make


def undeclare(function: Callable[..., Any]) -> None:
    """Forget a function that ``declare`` made, and its implementations. Raises ``ArgumentError`` for any other."""
    name = _check_function(function, "function of undeclare")
    if name not in _DECLARED:
        raise ArgumentError(expected("a function that declare made", of="function of undeclare", got=name, do="pass what declare gave"))
    _forget(name)


def _forget(name: str) -> None:
    _DECLARED.pop(name)
    DECLARATIONS.pop(name)
    for place in [place for place in _FORMER if place.name == name]:
        del _FORMER[place]
    for backend in registry.ordered():
        if name in vars(type(backend)):
            delattr(type(backend), name)
    delattr(TEXBackendBase, name)
    registry.changed()


def implement(function: Callable[..., Any], *, backend: str) -> Callable[[F], F]:
    """Give the registered backend ``backend`` a method for a declared function, ``(backend, *args, **kwargs)``, in the place of the one that it has.
    ``unimplement`` takes it back.

    Raises ``BackendError`` for an unknown backend, and for a method that does not take what the function is declared with, ``ArgumentError`` for a
    function that tex lacks.
    """
    name = _check_function(function, "function of implement")
    if name not in DECLARATIONS:
        raise ArgumentError(expected("a function of tex", of="function of implement", got=f"{name}{nearest(name)}", do="declare it by tex.declare"))

    def attach(method: F) -> F:
        check_callable(method, "what implement decorates")
        found = registry.find(backend)
        bound = binds_by_name(DECLARATIONS[name], method)
        check_method(DECLARATIONS[name], MethodType(bound, found), found.NAME)
        place = _Place(type(found), name)
        _FORMER.setdefault(place, vars(type(found)).get(name))
        setattr(*place, bound)
        registry.changed()
        return method

    return attach


def unimplement(function: Callable[..., Any], *, backend: str) -> None:
    """Take back what ``implement`` has given a backend for a function: it has the method again that it came with, or none.

    Raises ``BackendError`` for an unknown backend, ``ArgumentError`` for a function that it was given no method for.
    """
    name = _check_function(function, "function of unimplement")
    found = registry.find(backend)
    place = _Place(type(found), name)
    if place not in _FORMER:
        do = "pass what implement was given"
        raise ArgumentError(expected(f"a function that {found.NAME} was given by implement", of="function of unimplement", got=name, do=do))
    former = _FORMER.pop(place)
    if former is None:
        delattr(*place)
    else:
        setattr(*place, former)
    registry.changed()
