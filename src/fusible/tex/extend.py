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
from typing import Any, TypeVar

from fusible.errors import ArgumentError, expected
from fusible.tex.admission import check_method
from fusible.tex.dispatch import dispatcher
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Declaration, unserved_method
from fusible.tex.registry import registry

__all__ = ["declare", "implement", "undeclare"]

F = TypeVar("F", bound=Callable[..., Any])


def declare(*asks: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function to tex: the decorated one gives name, signature and documentation; its body is not used.

    ``asks`` names the parameters (without defaults) whose kinds decide the choice of a backend. Returns the dispatching function. Raises
    ``ArgumentError`` where tex has the name already or ``asks`` names no such parameter.
    """

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        name, signature = function.__name__, inspect.signature(function)
        if hasattr(TEXBackendBase, name):
            raise ArgumentError(expected("a new name", of="a function declared to tex", got=repr(name), do="choose another one"))
        for ask in asks:
            if ask not in signature.parameters or signature.parameters[ask].default is not inspect.Parameter.empty:
                of = f"the deciding arguments of {name}"
                raise ArgumentError(expected("parameters without defaults", of=of, got=repr(ask), do="name a parameter"))

        declaration = DECLARATIONS[name] = Declaration(name, signature, asks, inspect.getdoc(function) or "")
        setattr(TEXBackendBase, name, unserved_method(declaration))
        return dispatcher(declaration)

    return make


def undeclare(function: Callable[..., Any]) -> None:
    """Forget a function that ``declare`` made, and its implementations."""
    name = function.__name__
    DECLARATIONS.pop(name)
    for backend in registry.ordered():
        if name in vars(type(backend)):
            delattr(type(backend), name)
    delattr(TEXBackendBase, name)
    registry.changed()


def implement(function: Callable[..., Any], *, backend: str) -> Callable[[F], F]:
    """Give the registered backend ``backend`` a method for a declared function: ``(backend, *args, **kwargs)``.

    Raises ``BackendError`` for an unknown backend, and for a method that does not take what the function is declared with.
    """

    def attach(method: F) -> F:
        found = registry.find(backend)
        check_method(DECLARATIONS[function.__name__], MethodType(method, found), found.NAME)
        setattr(type(found), function.__name__, method)
        registry.changed()
        return method

    return attach
