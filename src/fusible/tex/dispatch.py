"""The hot path: from a call to the chosen backend's method.

A dispatcher computes the kinds of the deciding arguments and looks the chosen method up by them: two dictionary look-ups, no lock, no environment
read, no probe. A choice is made on the first call of each kind and forgotten when the registry changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Declaration, Request
from fusible.tex.operands import KINDS, kind
from fusible.tex.registry import Decision, registry
from fusible.tex.taping import Heard, local

__all__ = ["Call", "dispatcher", "explain", "hand_over", "record"]


@dataclass(frozen=True)
class Call:
    """One call that went through tex while ``record`` was on."""

    request: Request
    backend: str

    @property
    def function(self) -> str:
        return self.request.function


_recorders: list[list[Call]] = []
_recorders_lock = threading.Lock()


def _kinds(declaration: Declaration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The key of a call that names arguments or lacks some; a call that does not fit the signature raises ``TypeError``."""
    arguments = declaration.signature.bind(*args, **kwargs).arguments
    return tuple([kind(arguments[name]) for name in declaration.asks])


def _request(declaration: Declaration, key: tuple[Any, ...]) -> Request:
    return Request(declaration.name, tuple(zip(declaration.asks, key, strict=True)))


def _chosen(request: Request) -> Callable[..., Any]:
    backend = registry.choose(request)
    method = getattr(backend, request.function)
    if not _recorders:
        return method
    call = Call(request, backend.NAME)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        for calls in _recorders:
            calls.append(call)
        return method(*args, **kwargs)

    return recorded


def dispatcher(declaration: Declaration) -> Callable[..., Any]:
    """The public function of ``declaration``."""
    cache: dict[tuple[Any, ...], Callable[..., Any]] = {}
    places = tuple(declaration.positions[name] for name in declaration.asks)
    last, count = max(places, default=-1), len(places)
    first, second, third = (*places, 0, 0, 0)[:3]
    kinds = KINDS

    def drop() -> None:
        nonlocal cache
        cache = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        methods = cache
        if len(args) <= last:
            key = _kinds(declaration, args, kwargs)
        elif count == 2:  # most functions have two or three, and a loop costs as much as the kinds
            a, b = args[first], args[second]
            key = kinds[type(a)](a), kinds[type(b)](b)
        elif count == 3:
            a, b, c = args[first], args[second], args[third]
            key = kinds[type(a)](a), kinds[type(b)](b), kinds[type(c)](c)
        else:
            key = tuple([kinds[type(args[place])](args[place]) for place in places])
        method = methods.get(key)
        if method is None:
            declaration.signature.bind(*args, **kwargs)
            method = methods[key] = _chosen(_request(declaration, key))
        if local.note is None:
            return method(*args, **kwargs)
        result = method(*args, **kwargs)
        local.note(Heard(method, args, kwargs, result))
        return result

    registry.on_change(drop)
    call.__name__ = call.__qualname__ = declaration.name.removeprefix("prim_")
    call.__doc__ = declaration.doc
    call.__signature__ = declaration.signature  # type: ignore[attr-defined]
    call.__module__ = "fusible.tex.prim" if declaration.name.startswith("prim_") else "fusible.tex"
    return call


def explain(function: str, *args: Any, **kwargs: Any) -> Decision:
    """Who would serve ``tex.<function>(*args, **kwargs)``, and for each other backend why not. Nothing is computed.

    ``print(explain("gelu", x, None))`` shows it as text; ``function`` may name a function of ``tex.prim`` as ``"prim.add"``.
    """
    name = function.replace("prim.", "prim_")
    if name not in DECLARATIONS:
        raise AttributeError(f"tex has no function {function!r}")
    declaration = DECLARATIONS[name]
    return registry.decide(_request(declaration, _kinds(declaration, args, kwargs)))


def hand_over(backend: TEXBackendBase, function: str, *args: Any, **kwargs: Any) -> Any:
    """Serve a call by the best backend that comes after ``backend``.

    For a backend's method that is refused by a value which no kind shows (a window, a probability). It must not have written anything. Raises
    ``NotServedError`` where nobody else serves the call.
    """
    declaration = DECLARATIONS[function]
    request = _request(declaration, _kinds(declaration, args, kwargs))
    return getattr(registry.choose_after(backend, request), function)(*args, **kwargs)


@contextmanager
def record() -> Iterator[list[Call]]:
    """Record every tex call made in this process while the context is open: ``with record() as calls: ...``."""
    calls: list[Call] = []
    with _recorders_lock:
        _recorders.append(calls)
    registry.changed()
    try:
        yield calls
    finally:
        with _recorders_lock:
            _recorders[:] = [other for other in _recorders if other is not calls]
        registry.changed()
