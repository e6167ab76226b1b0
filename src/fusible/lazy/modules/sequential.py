"""Modules one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fusible.errors import ArgumentError, DTypeError, MissingNameError, expected
from fusible.lazy.locate import shows_user
from fusible.lazy.modules.module import Module

__all__ = ["Sequential"]


class Sequential(Module):
    """``modules`` applied in order, each to the result of the one before. A function such as ``relu`` may be among them.

    They are named ``"0"``, ``"1"``, ..., or by the keys of one dict: ``Sequential({"up": Linear(2, 8), "down": Linear(8, 2)})``. The result has a
    length, iterates over the modules, and is indexed by position or name; a name is an attribute too. ``modules`` is the dict.
    Raises ``DTypeError`` for what cannot be called.
    """

    @shows_user
    def __init__(self, *modules: Callable[..., Any] | dict[str, Callable[..., Any]]) -> None:
        if len(modules) == 1 and isinstance(modules[0], dict):
            named: dict[str, Any] = dict(modules[0])
        else:
            named = {str(i): module for i, module in enumerate(modules)}
        for name, module in named.items():
            if not callable(module) or not isinstance(name, str):
                got = f"{name!r}: {type(module).__name__}"
                wanted = "modules or functions, or one dict of them by name"
                raise DTypeError(expected(wanted, of="Sequential", got=got, do="pass what can be called"))
        self.modules = named

    def forward(self, input: Any) -> Any:
        """``modules[-1](... modules[0](input))``; ``input`` itself where there are none."""
        for module in self.modules.values():
            input = module(input)
        return input

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Name and module of each; functions are left out."""
        for name, module in self.modules.items():
            if isinstance(module, Module):
                yield name, module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        modules = vars(self).get("modules", {})
        if name not in modules:
            raise MissingNameError(expected("the name of one of its modules", of=f"the attribute {name!r} of a Sequential", got=name, do="index it"))
        return modules[name]

    def __len__(self) -> int:
        return len(self.modules)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self.modules.values())

    @shows_user
    def __getitem__(self, idx: int | str) -> Callable[..., Any]:
        if isinstance(idx, str) and idx in self.modules:
            return self.modules[idx]
        if isinstance(idx, int) and -len(self) <= idx < len(self):
            return list(self.modules.values())[idx]
        wanted = f"a position from {-len(self)} to {len(self) - 1} or one of {', '.join(self.modules)}" if len(self) else "no index"
        raise ArgumentError(expected(wanted, of=f"a Sequential of {len(self)} modules", got=repr(idx), do="index one that it has"))
