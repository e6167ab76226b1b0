"""How names are made to lead to modules: one finder on ``sys.meta_path``, driven by tables.

A name is *another name* of a module that exists, a *package* made here to hold such names, or a module of another package that something is
done *around*: before its code runs and after.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType

__all__ = ["Around", "Names", "alias_submodules", "found_elsewhere"]

Around = Callable[[ModuleType], AbstractContextManager[None]]
"""A context that a module's code runs in; what it does after its ``yield`` sees the finished module."""


@dataclass(eq=False)
class Names(importlib.abc.MetaPathFinder):
    """A finder for ``aliases`` (name: the module it stands for), ``packages`` (name: the module whose ``__all__`` it shows, or None for an empty
    one) and ``around`` (name: what to do around the module that the other finders find).

    What is really installed keeps its name, unless that is among ``forced``. ``made`` are the names of the modules made so far.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str | None] = field(default_factory=dict)
    around: Mapping[str, Around] = field(default_factory=dict)
    forced: frozenset[str] = frozenset()
    made: list[str] = field(default_factory=list)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname in names for names in (self.aliases, self.packages, self.around)):
            return None
        spec = None if fullname in self.forced else found_elsewhere(fullname, path)
        if spec is None and fullname in self.aliases:
            return importlib.machinery.ModuleSpec(fullname, _Alias(self, self.aliases[fullname]))
        if spec is None and fullname in self.packages:
            return importlib.machinery.ModuleSpec(fullname, _Package(self, self.packages[fullname]), is_package=True)
        if spec is not None and spec.loader is not None and fullname in self.around:
            spec.loader = _Within(spec.loader, self.around[fullname])  # pyright: ignore[reportArgumentType]
        return spec

    def forget(self) -> None:
        """Take the modules that this finder made out of ``sys.modules``, and the names by which their packages hold them."""
        for name in reversed(self.made):
            module = sys.modules.pop(name, None)
            parent, _, child = name.rpartition(".")
            package = sys.modules.get(parent)
            if package is not None and package.__name__ == parent and vars(package).get(child) is module:  # not another name of a real package
                delattr(package, child)
        self.made.clear()


def found_elsewhere(fullname: str, path: Sequence[str] | None = None) -> importlib.machinery.ModuleSpec | None:
    """What the finders beside ours find under a name."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and not isinstance(finder, Names):
            spec = find(fullname, path, None)
            if spec is not None:
                return spec
    return None


def alias_submodules(alias: str, target: str) -> list[str]:
    """Let ``alias.x`` lead to the module ``target.x`` for every one that is loaded; returns the names made.

    The import system would otherwise load a second copy of each, with classes and a registry of its own.
    """
    made = []
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{target}."):
            other = alias + name.removeprefix(target)
            if other not in sys.modules:
                sys.modules[other] = module
                made.append(other)
    return made


class _Alias(importlib.abc.Loader):
    """Puts the module ``target`` in the place of the one that the import system made for its other name.

    The target keeps its own ``__spec__`` that way, so that it can still be found, reloaded and pickled from.
    """

    def __init__(self, names: Names, target: str) -> None:
        self._names, self._target = names, target

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._target)
        self._names.made += [module.__name__, *alias_submodules(module.__name__, self._target)]


class _Package(importlib.abc.Loader):
    """A package without a file, which shows the public names of ``shown`` but those that submodules of it have."""

    def __init__(self, names: Names, shown: str | None) -> None:
        self._names, self._shown = names, shown

    def exec_module(self, module: ModuleType) -> None:
        self._names.made.append(module.__name__)
        if self._shown is not None:
            source = importlib.import_module(self._shown)
            shown = [name for name in source.__all__ if f"{module.__name__}.{name}" not in self._names.aliases]
            vars(module).update({name: getattr(source, name) for name in shown}, __all__=shown, __doc__=source.__doc__)


class _Within(importlib.abc.Loader):
    """The loader that was found, with something around the module's code; everything else is asked of it."""

    def __init__(self, loader: importlib.abc.Loader, around: Around) -> None:
        self._loader, self._around = loader, around

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with self._around(module):
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
