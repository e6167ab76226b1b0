"""``autocast``: which recipe the modules called inside it follow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from types import TracebackType
from typing import Any, TypeVar

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.locks import Lock
from fusible.quantized import DelayedScaling, Recipe

__all__ = ["OUTSIDE", "autocast", "autocast_of", "current_autocast", "leave_autocasts", "trace_constant"]


class _Local(threading.local):
    def __init__(self) -> None:  # in each thread, at its first look: what torch.compile traces asks again whether the attribute is there
        self.current: autocast | None = None


_local = _Local()
_lock = Lock()
_keys: dict[tuple[Recipe | None, Any], str] = {}
_autocasts: dict[str, autocast] = {}
_DEFAULT = DelayedScaling()

F = TypeVar("F", bound=Callable[..., Any])


def trace_constant(function: F) -> F:
    """Let ``torch.compile`` call ``function`` when it traces, and take the result for a constant: ``torch.compiler.assume_constant_result``, which
    brings the compiler to everyone who imports the caller."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@trace_constant
def _key_of(recipe: Recipe | None, group: Any) -> str:
    """A name for the recipe and the group, by value."""
    if recipe is not None and not all(field.name in vars(recipe) for field in fields(recipe)):
        got, do = "one made inside a function that torch.compile traces", "make it outside"
        raise ArgumentError(expected("a recipe with its options", of="autocast", got=got, do=do))
    key = _keys.get((recipe, group))
    if key is None:
        with _lock:
            key = _keys.setdefault((recipe, group), f"{recipe} {len(_keys)}")
    return key


class autocast:
    """``with autocast(recipe=DelayedScaling()): y = model(x)``: the modules called inside quantize as ``recipe`` says.

    ``enabled=False`` switches quantization off; ``recipe`` defaults to ``DelayedScaling()``. ``amax_reduction_group``: the processes over which
    delayed scaling takes the maximum of its amaxes, where ``recipe.reduce_amax``. Contexts nest, per thread. Raises ``DTypeError`` for anything but a
    recipe.

    Inside a function that ``torch.compile`` traces it holds for what is called in it; the recipe itself must come from outside of the function.
    """

    def __init__(self, enabled: bool = True, recipe: Recipe | None = None, *, amax_reduction_group: Any = None) -> None:
        if not isinstance(enabled, int) and type(enabled).__name__ != "bool_":
            raise DTypeError(expected("a bool", of="enabled of autocast", got=type(enabled).__qualname__, do="pass one"))
        if recipe is not None and not isinstance(recipe, Recipe):
            raise DTypeError(expected("a recipe", of="autocast", got=repr(recipe), do="give e.g. fusible.DelayedScaling() or Float8CurrentScaling()"))
        self.recipe: Recipe | None = (recipe.immutable() if recipe is not None else _DEFAULT) if enabled else None
        self.amax_reduction_group = amax_reduction_group
        self.key = _key_of(self.recipe, amax_reduction_group)
        self._former: list[autocast | None] = []

    def __enter__(self) -> autocast:
        self._former.append(_local.current)
        _local.current = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _local.current = self._former.pop()


OUTSIDE = autocast(enabled=False)
"""What is in force outside of every ``autocast``."""


def current_autocast() -> autocast:
    """The innermost ``autocast`` of this thread."""
    return _local.current or OUTSIDE


def leave_autocasts() -> None:
    """Be outside of every ``autocast`` in this thread. Those that are open put back what was before them when they are left."""
    _local.current = None


def autocast_of(key: str) -> autocast:
    """An ``autocast`` that has that ``key``."""
    found = _autocasts.get(key)
    if found is None:
        recipe, group = next(pair for pair, known in _keys.copy().items() if known == key)
        found = _autocasts[key] = autocast(recipe is not None, recipe, amax_reduction_group=group)
    return found
