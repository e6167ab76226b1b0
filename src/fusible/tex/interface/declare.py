"""Declaring a tex function: its signature and documentation once, and which of its arguments a backend may refuse by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["DECLARATIONS", "Declaration", "Request", "function", "requires"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Request:
    """What a backend is asked to serve: the function and the kinds of those arguments that decide.

    ``request["input"]`` is the kind of the argument ``input``: ``(device kind, dtype)`` for a tensor, the value itself for a flag.
    """

    function: str
    kinds: tuple[tuple[str, Hashable], ...]

    def __getitem__(self, argument: str) -> Hashable:
        return dict(self.kinds)[argument]

    @property
    def devices(self) -> frozenset[str]:
        """The device kinds that the arguments live on (``"lazy"`` for tensors that record)."""
        return frozenset(_devices(tuple(kind for _, kind in self.kinds)))

    def __str__(self) -> str:
        return f"{self.function}({', '.join(f'{name}={_show(kind)}' for name, kind in self.kinds)})"


def _devices(kind: Hashable) -> set[str]:
    if not isinstance(kind, tuple):
        return set()
    found = {kind[-2]} if len(kind) >= 2 and isinstance(kind[-2], str) else set()
    return found.union(*(_devices(part) for part in kind))


def _show(kind: Hashable) -> str:
    if isinstance(kind, tuple):
        return ":".join(_show(part) for part in kind)
    return str(kind).removeprefix("torch.")


@dataclass(frozen=True)
class Declaration:
    """One function of the interface."""

    name: str
    signature: inspect.Signature = field(repr=False)
    asks: tuple[str, ...]
    doc: str = field(repr=False)

    @property
    def positions(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.signature.parameters)}


DECLARATIONS: dict[str, Declaration] = {}
"""Every function of the interface by name, in the order of declaration."""


def function(*asks: str) -> Callable[[F], F]:
    """Declare a method of an interface mixin as a tex function; ``asks`` names the arguments whose kinds a choice depends on.

    Every name in ``asks`` must be a parameter without a default.
    """

    def declare(method: F) -> F:
        signature = inspect.signature(method)
        signature = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "self"])
        name = method.__name__
        unknown = [ask for ask in asks if ask not in signature.parameters]
        assert not unknown, f"{name} asks by {unknown}, which are no parameters of it"
        DECLARATIONS[name] = Declaration(name, signature, asks, inspect.getdoc(method) or "")
        return method

    return declare


def requires(supports: Callable[[Request], str | None]) -> Callable[[F], F]:
    """Attach to a backend's method its answer to a request: the reason for refusing it, or None."""

    def attach(method: F) -> F:
        method.__supports__ = supports  # type: ignore[attr-defined]
        return method

    return attach
