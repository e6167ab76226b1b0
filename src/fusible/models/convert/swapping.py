"""A module's class is exchanged for one that computes by Fusible, and back. The module stays the object that it was.

So whatever knows it goes on knowing it: the names of a state dict, parameters that are tied, optimizers, hooks, ``isinstance`` with its former class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any, ClassVar

from torch import nn

from fusible.errors import ArgumentError, expected
from fusible.tex.calls.transaction import Write, run

__all__ = ["Swap", "Swapped", "restore", "swap", "when_read"]

_FORMER = "_fusible_former"


class Swapped:
    """Base of what a swapped module computes by. Its class derives from this, from ``kind``, and from ``original``, in this order."""

    original: ClassVar[type[Any]]
    """The class that the module had."""
    kind: ClassVar[type[Any]]
    """The class of the package that the module computes by."""
    kept: ClassVar[tuple[str, ...]] = ()
    """The names of what stays as the former class has it, though a base of ``kind`` has another."""
    prefix: ClassVar[str] = "Fusible"
    """What the class's name begins with, before that of the former one: nothing for blocks, which lists such as FSDP's name."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """The class is made while the program runs, so a pickle names the two that it is made of."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _blank, (self.kind, self.original), state


@dataclass(frozen=True, eq=False)
class Swap:
    """``module`` is to compute by ``kind``, with these attributes."""

    module: nn.Module
    kind: type[Swapped]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@cache
def class_of(kind: type[Swapped], original: type[Any]) -> type[Any]:
    """The class of modules of class ``original`` that compute by ``kind``. It has the former's name, as lists of names and patterns look for it."""
    own = {"original": original, "kind": kind, "__module__": original.__module__, "__qualname__": f"{kind.prefix}{original.__qualname__}"}
    kept = {name: getattr(original, name) for name in kind.kept if hasattr(original, name)}
    ours, theirs = _arguments(kind), _arguments(original)
    if len(ours) == len(theirs) and ours != theirs:
        kept["forward"] = _renamed(kind, original, dict(zip(theirs, ours, strict=True)))
    return type(f"{kind.prefix}{original.__name__}", (kind, original), {**kept, **own, "__doc__": kind.__doc__})


def _arguments(cls: type[Any]) -> list[str]:
    """The names of the arguments of a class's forward; none where it takes others, too."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:] if hasattr(cls, "forward") else []
    return [one.name for one in parameters] if all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters) else []


def _renamed(kind: type[Any], original: type[Any], names: Mapping[str, str]) -> Any:
    """The forward of ``kind``, which may be called by the names that the former class has for its arguments."""

    @wraps(original.forward)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return kind.forward(self, *args, **{names.get(name, name): value for name, value in named.items()}) if named else kind.forward(self, *args)

    return forward


def swap(swaps: Iterable[Swap], more: Iterable[Write] = ()) -> None:
    """Make the swaps and the writes ``more``, all of them or, where an interrupt or an error comes, none."""
    writes: list[Write] = [*more]
    for one in swaps:
        attributes = vars(one.module)
        former = {name: attributes[name] for name in one.attributes if name in attributes}
        writes.append(partial(attributes.update, {**one.attributes, _FORMER: (tuple(one.attributes), former)}))
        writes.append(partial(object.__setattr__, one.module, "__class__", class_of(one.kind, type(one.module))))
    run(writes)


def restore(modules: Iterable[nn.Module], more: Iterable[Write] = ()) -> int:
    """Give modules the classes and attributes back that they had, and make the writes ``more``; how many modules there were. Others among ``modules``
    are left alone. Raises ``ArgumentError`` where somebody else has exchanged a class since, and changes nothing then."""
    writes: list[Write] = [*more]
    swapped = [module for module in modules if isinstance(module, Swapped)]
    changed = next((module for module in swapped if type(module) is not class_of(module.kind, module.original)), None)
    if changed is not None:
        got, do = f"a {type(changed).__name__}", "take parametrizations and the like off first"
        raise ArgumentError(expected("modules of the classes that they were given", of="convert with undo", got=got, do=do))
    for module in swapped:
        attributes = vars(module)
        names, former = attributes[_FORMER]
        kept = {name: value for name, value in attributes.items() if name not in names and name != _FORMER} | former
        writes += [partial(object.__setattr__, module, "__class__", module.original), partial(attributes.clear), partial(attributes.update, kept)]
    run(writes)
    return len(swapped)


def when_read(function: Callable[[], None]) -> Callable[[], None]:
    """Call ``function`` where a swapped module is read from a pickle, by a process that may have converted nothing."""
    _when_read.append(function)
    return function


_when_read: list[Callable[[], None]] = []


def _blank(kind: type[Swapped], original: type[Any]) -> Any:
    for function in _when_read:
        function()
    return object.__new__(class_of(kind, original))
