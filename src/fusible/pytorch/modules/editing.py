"""The methods of a list, as ``torch.nn.Sequential`` has them, for the containers that are called like one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from fusible.errors import ArgumentError, DTypeError, OutOfRangeError, expected
from fusible.tex.calls.transaction import run

__all__ = ["ModuleListMethods", "check_module"]

_Item = tuple[str, nn.Module | None]


def check_module(module: object, of: str) -> None:
    """Raise ``DTypeError`` unless ``module`` is an ``nn.Module``."""
    if not isinstance(module, nn.Module):
        raise DTypeError(expected("modules", of=of, got=type(module).__qualname__, do="give nn.Module instances"))


class ModuleListMethods:
    """``append``, ``extend``, ``insert``, ``pop``, ``[]``, ``del``, ``+``, ``+=``, ``*`` and ``*=``, for a subclass that is an ``nn.Module`` too.

    A change counts from the next call on. The scales of delayed scaling go with their modules: what stays keeps its own, wherever it now stands, and
    what is new begins anew. Numbers stand for places, so they follow a change; a name that a module was given stays with it. A call that raises has
    changed nothing.
    """

    if TYPE_CHECKING:
        _modules: dict[str, nn.Module | None]

        def __init__(self, *modules: Any) -> None: ...
        def __iter__(self) -> Iterator[nn.Module]: ...

    def append(self, module: nn.Module) -> Self:
        """Add a module at the end. Raises ``DTypeError`` for what is no module."""
        return self.extend((module,))

    def extend(self, modules: Iterable[nn.Module]) -> Self:
        """Add modules at the end. Raises ``DTypeError`` for what is no module."""
        added = list(modules)
        for module in added:
            check_module(module, type(self).__name__)
        return self._hold([*self._modules.items(), *(("", module) for module in added)])

    def insert(self, index: int, module: nn.Module) -> Self:
        """Put a module before the one at ``index``, of ``-len`` to ``len``. Raises ``OutOfRangeError`` (an ``IndexError``) and ``DTypeError``."""
        check_module(module, type(self).__name__)
        items = list(self._modules.items())
        items.insert(self._place(index, len(items), end=True), ("", module))
        return self._hold(items)

    def pop(self, index: int | slice = -1) -> Any:
        """Take a module out, or a Sequential of several. Raises ``OutOfRangeError`` (an ``IndexError``)."""
        taken = self[index]
        del self[index]
        return taken

    def __getitem__(self, index: int | slice) -> Any:
        items = list(self._modules.items())
        return self._new(dict(items[index])) if isinstance(index, slice) else items[self._place(index, len(items))][1]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        items = list(self._modules.items())
        place = self._place(index, len(items))
        check_module(module, type(self).__name__)
        items[place] = (items[place][0], module)
        self._hold(items)

    def __delitem__(self, index: int | slice) -> None:
        items = list(self._modules.items())
        del items[index if isinstance(index, slice) else self._place(index, len(items))]
        self._hold(items)

    def __add__(self, modules: Iterable[nn.Module]) -> Any:
        """A new Sequential of the modules of both, which has no scales yet."""
        return self._new(*self, *self._addends(modules, "+"))

    def __iadd__(self, modules: Iterable[nn.Module]) -> Self:
        return self.extend(self._addends(modules, "+="))

    def __mul__(self, times: int) -> Any:
        """A new Sequential in which the same modules stand ``times`` times over. Raises ``DTypeError`` and ``ArgumentError``."""
        return self._new(*[*self] * self._factor(times))

    def __rmul__(self, times: int) -> Any:
        return self * times

    def __imul__(self, times: int) -> Self:
        return self.extend([*self] * (self._factor(times) - 1))

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.isdigit()]

    def _new(self, *modules: Any) -> Any:
        """A container of its own kind."""
        raise NotImplementedError

    def _addends(self, modules: Any, sign: str) -> list[nn.Module]:
        """The modules on the right of the operator ``sign``."""
        if not isinstance(modules, (nn.Sequential, ModuleListMethods)):
            got, do = f"a {type(modules).__qualname__}", "put modules into one, or extend by them"
            raise ArgumentError(expected("a Sequential", of=f"what {sign} adds to one", got=got, do=do))
        return list(modules)

    def _factor(self, times: int) -> int:
        if not isinstance(times, int):
            raise DTypeError(expected("a whole number", of="what a Sequential is multiplied by", got=type(times).__qualname__, do="give one"))
        if times < 1:
            raise ArgumentError(expected("at least 1", of="what a Sequential is multiplied by", got=times, do="give such a number"))
        return times

    def _place(self, index: int, count: int, *, end: bool = False) -> int:
        """``index``, which may be negative, counted from the start of ``count`` places. ``end``: the place behind the last one is allowed, too."""
        try:
            place = operator.index(index)
        except TypeError:
            do = "give one, or a slice to take or delete several"
            raise DTypeError(expected("a whole number", of="an index of a Sequential", got=type(index).__qualname__, do=do)) from None
        if not -count <= place < count + end:
            do = "give the place of one, as a list's" if count else "append a module first"
            raise OutOfRangeError(expected(f"a place among {count} modules", of="an index of a Sequential", got=place, do=do))
        return place + count if place < 0 else place

    def _hold(self, items: Iterable[_Item]) -> Self:
        """Replace the children by these, each under the name that it was given, or under its number."""
        numbered = {name if name and not name.isdigit() else str(place): module for place, (name, module) in enumerate(items)}
        # In place: what was arranged for the children looks at this very dictionary. At once: an interrupt finds the old ones or the new.
        run([partial(self._modules.clear), partial(self._modules.update, numbered)])
        return self
