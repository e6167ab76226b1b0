"""Registering fusions of operations: functions from a list of operations to a list in which some have been put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from fusible.errors import ArgumentError, check_number, check_switch, expected
from fusible.locks import Lock

if TYPE_CHECKING:
    from fusible.pytorch.ops.op import FusibleOperation
    from fusible.quantized import Recipe

__all__ = [
    "FusionFunction",
    "Kind",
    "fusions",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "registration_epoch",
    "unregister_fusion",
]

Kind = Literal["forward", "backward", "forward_backward"]


class FusionFunction(Protocol):
    """``fn(ops, *, recipe) -> ops``: the same basic operations in the same order, some of them inside fused operations."""

    def __call__(self, ops: list[FusibleOperation], *, recipe: Recipe | None) -> list[FusibleOperation]: ...


class _Entry(NamedTuple):
    kind: Kind
    function: Callable[..., Any]
    priority: int


_entries: list[_Entry] = []
_lock = Lock()
_epoch = 0


class Registration:
    """The result of registering a fusion. As a context manager it unregisters the fusion at the end of the body."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: Any) -> None:
        unregister_fusion(self.function)


def register_forward_fusion(fn: FusionFunction, *, prepend: bool = False, priority: int = 0) -> Registration:
    """Fuse forward passes by ``fn``. Higher priorities come first; among equals the earlier registered, with ``prepend`` the later.

    Use as a call, or ``with register_forward_fusion(fn): ...`` for the body alone. Raises ``ArgumentError`` for a function that is registered; what
    its module defines by that name anew takes its place.
    """
    return _register("forward", fn, prepend, priority)


def register_backward_fusion(fn: FusionFunction, *, prepend: bool = False, priority: int = 0) -> Registration:
    """As ``register_forward_fusion``, of backward passes."""
    return _register("backward", fn, prepend, priority)


def register_forward_backward_fusion(fn: FusionFunction, *, prepend: bool = False, priority: int = 0) -> Registration:
    """As ``register_forward_fusion``, of both passes together: what it puts together is one operation in both, and is looked at first."""
    return _register("forward_backward", fn, prepend, priority)


def unregister_fusion(fn: Callable[..., Any]) -> None:
    """Take a fusion back. Raises ``ArgumentError`` for one that is not registered."""
    global _epoch
    with _lock:
        kept = [entry for entry in _entries if entry.function != fn]  # a class's method is another object each time
        if len(kept) == len(_entries):
            raise ArgumentError(expected("a registered fusion", of="unregister_fusion", got=_name(fn), do="give the function that was registered"))
        _entries[:] = kept
        _epoch += 1


def fusions(kind: Kind) -> list[Callable[..., Any]]:
    """The registered functions of a kind, in the order in which they are asked."""
    with _lock:
        return [entry.function for entry in sorted((e for e in _entries if e.kind == kind), key=lambda entry: -entry.priority)]


def registration_epoch() -> int:
    """Changes with every registration."""
    return _epoch


def _register(kind: Kind, fn: Callable[..., Any], prepend: bool, priority: int) -> Registration:
    global _epoch
    check_switch(prepend, f"prepend of register_{kind}_fusion")
    check_number(priority, f"priority of register_{kind}_fusion")
    if not callable(fn):
        raise ArgumentError(expected("a function of a list of operations", of=f"register_{kind}_fusion", got=repr(fn), do="give fn(ops, *, recipe)"))
    with _lock:
        if any(entry.function == fn for entry in _entries):
            raise ArgumentError(expected("a new function", of=f"register_{kind}_fusion", got=f"{_name(fn)} again", do="unregister it first"))
        _entries[:] = [entry for entry in _entries if not (entry.kind == kind and _defined_again(entry.function, fn))]
        _entries.insert(0 if prepend else len(_entries), _Entry(kind, fn, priority))
        _epoch += 1
    return Registration(fn)


def _defined_again(former: Any, fn: Any) -> bool:
    """Whether the module of ``former`` has defined ``fn`` by the same name since, as when a cell of a notebook is run again."""
    name = getattr(fn, "__qualname__", "<")
    return "<" not in name and (fn.__module__, name) == (former.__module__, getattr(former, "__qualname__", ""))


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", repr(fn))
