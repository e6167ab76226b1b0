"""Modules one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.lazy.locate import shows_user
from fusible.lazy.modules.module import Module

__all__ = ["Sequential"]


class Sequential(Module):
    """``modules`` applied in order: each takes what the one before it gave. A function such as ``relu`` may stand among them.

    They are named ``"0"``, ``"1"``, ..., or by the keys of one dict: ``Sequential({"up": Linear(2, 8), "down": Linear(8, 2)})``. The result has a
    length, iterates over the modules, and is indexed by position or name. Raises ``DTypeError`` for what cannot be called.
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
                raise DTypeError(
                    expected("modules or functions, or one dict of them by name", of="Sequential", got=got, do="pass what can be called")
                )
        self._modules = named

    def forward(self, x: Any) -> Any:
        """``modules[-1](... modules[0](x))``; ``x`` itself where there are none."""
        for module in self._modules.values():
            x = module(x)
        return x

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Name and module of each; functions are left out."""
        for name, module in self._modules.items():
            if isinstance(module, Module):
                yield name, module

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self._modules.values())

    @shows_user
    def __getitem__(self, index: int | str) -> Callable[..., Any]:
        if isinstance(index, str) and index in self._modules:
            return self._modules[index]
        if isinstance(index, int) and -len(self) <= index < len(self):
            return list(self._modules.values())[index]
        wanted = f"a position from {-len(self)} to {len(self) - 1} or one of {', '.join(self._modules)}" if len(self) else "no index"
        raise ArgumentError(expected(wanted, of=f"a Sequential of {len(self)} modules", got=repr(index), do="index one that it has"))
