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
from typing import Any, TypeVar

from fusible.errors import ArgumentError, expected
from fusible.tex.dispatch import dispatcher
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Declaration
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

        def unserved(self: TEXBackendBase, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{name} not implemented by {self.name}")

        setattr(TEXBackendBase, name, unserved)
        DECLARATIONS[name] = Declaration(name, signature, asks, inspect.getdoc(function) or "")
        return dispatcher(DECLARATIONS[name])

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

    Raises ``BackendError`` for an unknown backend.
    """

    def attach(method: F) -> F:
        setattr(type(registry.find(backend)), function.__name__, method)
        registry.changed()
        return method

    return attach
