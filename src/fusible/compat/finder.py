"""One finder on ``sys.meta_path``, driven by tables, that makes names lead to modules.

A name is an *alias* of a module that exists, a *virtual package* that shows names of other modules, or a module of another package that is patched:
something is done *around* it, before its code runs and after.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

from fusible.errors import MissingModuleError, MissingNameError, expected

__all__ = ["Names", "Patch", "VirtualPackage", "adapt_loaded", "after", "alias_submodules", "found_elsewhere", "replace"]

Patch = Callable[[ModuleType], AbstractContextManager[None]]
"""A context manager in which a module's code runs."""


def after(change: Callable[[ModuleType], None]) -> Patch:
    """A patch that calls ``change`` with the module when its code has run."""

    @contextmanager
    @functools.wraps(change)
    def around(module: ModuleType) -> Iterator[None]:
        yield
        change(module)

    return around


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``make(theirs)`` in the place of the function ``owner.name``. ``theirs`` is the owner's own function, even where it was replaced before:
    a module that stays loaded is patched again by the next ``install``."""
    present = getattr(owner, name)
    # The mark names the function that it is on: ``functools.wraps`` copies it to a wrapper of somebody else's, which has to stay.
    marked, former = getattr(present, "replaced", (None, present))
    theirs: Callable[..., Any] = former if marked is present else present
    made: Any = functools.wraps(theirs)(make(theirs))
    made.replaced = made, theirs
    setattr(owner, name, made)


@dataclass(frozen=True)
class VirtualPackage:
    """What a virtual package shows: ``names`` (None: all public ones) of the modules ``of``, each from the first module that has it; and the packages
    and modules below it. Names are looked up on first use.

    ``about`` says in a few words what is there, for the error of a name that is not; without it, the error lists the names. ``standalone``: another
    package of the same name may have it among its modules; without it, it is there only where the package above it was made here too. ``version``: of
    the distribution that it stands for, which ``importlib.metadata`` finds: frameworks ask for that before they import. ``lacking``: why some names
    are not there.
    """

    of: tuple[str, ...] = ()
    names: tuple[str, ...] | None = ()
    about: str = ""
    standalone: bool = False
    version: str = ""
    lacking: Mapping[str, str] = field(default_factory=dict)

    def public(self) -> list[str]:
        """The names that are there."""
        if self.names is None:
            return sorted({name for source in self.of for name in importlib.import_module(source).__all__})
        return sorted(name for name in self.names if self.find(name) is not None)

    def find(self, name: str) -> ModuleType | None:
        """The module that has ``name``, or None."""
        if self.names is not None and name not in self.names:
            return None
        for source in self.of:
            module = importlib.import_module(source)
            if hasattr(module, name) if self.names is not None else name in module.__all__:
                return module
        return None


@dataclass(eq=False)
class Names(importlib.abc.MetaPathFinder):
    """A finder for ``aliases`` (name: the module it stands for), ``packages`` (name: what it shows) and ``patches`` (name: what to do around the
    module that the other finders find).

    What is really installed keeps its name, unless that is among ``forced``. ``made`` are the names of the modules made so far. What a made package
    lacks is told by ``MissingNameError`` for an attribute, by ``MissingModuleError`` for an import.
    """

    aliases: dict[str, str] = field(default_factory=dict)
    packages: Mapping[str, VirtualPackage] = field(default_factory=dict)
    patches: Mapping[str, Patch] = field(default_factory=dict)
    forced: frozenset[str] = frozenset()
    made: list[str] = field(default_factory=list)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname in names for names in (self.aliases, self.packages, self.patches)):
            parent, _, name = fullname.rpartition(".")
            if parent in self.packages and parent in self.made:  # where nobody else looks
                raise MissingModuleError(self._missing(parent, name), name=parent)
            return None
        spec = None if fullname in self.forced else found_elsewhere(fullname, path)
        if spec is None and fullname in self.aliases:
            return importlib.machinery.ModuleSpec(fullname, _Alias(self, self.aliases[fullname]))
        if spec is None and fullname in self.packages and self._may_make(fullname):
            return importlib.machinery.ModuleSpec(fullname, _Package(self, self.packages[fullname]), is_package=True)
        if spec is not None and spec.loader is not None and fullname in self.patches:
            spec.loader = _Within(spec.loader, self.patches[fullname])  # pyright: ignore[reportArgumentType]
        return spec

    def find_distributions(self, context: importlib.metadata.DistributionFinder.Context) -> Iterator[importlib.metadata.Distribution]:
        """The distributions that made packages stand for, by ``importlib.metadata``."""
        for name, virtual in self.packages.items():
            asked = context.name is None or context.name.replace("-", "_") == name
            if virtual.version and asked and (name in self.forced or found_elsewhere(name) is None):
                yield _Distribution(name, virtual.version)

    def _may_make(self, fullname: str) -> bool:
        parent = fullname.rpartition(".")[0]
        return not parent or self.packages[fullname].standalone or parent in self.made

    def below(self, package: str) -> list[str]:
        """The modules that the tables have directly below a package."""
        found = {name.rpartition(".") for name in (*self.packages, *self.aliases)}
        return sorted(name for parent, _, name in found if parent == package)

    def look_up(self, package: str, name: str) -> Any:
        """The value of a name in a virtual package. Raises ``MissingNameError`` where it has none."""
        if name.startswith("__"):  # asked by Python itself, of every module
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in self.below(package):
            return importlib.import_module(f"{package}.{name}")
        source = self.packages[package].find(name)
        if source is None:
            raise MissingNameError(self._missing(package, name), name=name)
        return getattr(source, name)

    def _missing(self, package: str, name: str) -> str:
        virtual = self.packages[package]
        there = virtual.about or ", ".join([*virtual.public(), *self.below(package)])
        do = "use one, or install NVIDIA's Python package for the rest"
        got = f"{name}, which {virtual.lacking[name]}" if name in virtual.lacking else name
        return expected(f"one of {there}", of=f"{package} as Fusible has it", got=got, do=do)

    def forget(self) -> None:
        """Remove the modules that this finder made from ``sys.modules``, and from the attributes of their packages."""
        for name in reversed(self.made):
            module = sys.modules.pop(name, None)
            parent, _, child = name.rpartition(".")
            package = sys.modules.get(parent)
            if package is not None and package.__name__ == parent and vars(package).get(child) is module:  # not another name of a real package
                delattr(package, child)
        self.made.clear()


def found_elsewhere(fullname: str, path: Sequence[str] | None = None) -> importlib.machinery.ModuleSpec | None:
    """The spec that another finder than ours has for a name, or None."""
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


def adapt_loaded(patches: Mapping[str, Patch]) -> None:
    """Patch the modules that were loaded before the finder was installed."""
    for name, adapt in patches.items():
        if name in sys.modules:
            with adapt(sys.modules[name]):
                pass


class _Alias(importlib.abc.Loader):
    """Puts the module ``target`` in the place of the one that the import system made for its other name.

    The target keeps its own ``__spec__`` that way, so that it can still be found, reloaded and pickled from.
    """

    def __init__(self, names: Names, target: str) -> None:
        self._names, self._target = names, target

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._target)
        self._names.made += [module.__name__, *alias_submodules(module.__name__, self._target)]


class _Distribution(importlib.metadata.Distribution):
    """Tells a name and a version, and has no files."""

    def __init__(self, name: str, version: str) -> None:
        self._metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self._metadata if filename == "METADATA" else None

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return Path(path)


class _Package(importlib.abc.Loader):
    """A package without a file. Its names are looked up when they are asked for, so that making it imports nothing."""

    def __init__(self, names: Names, virtual: VirtualPackage) -> None:
        self._names, self._virtual = names, virtual

    def exec_module(self, module: ModuleType) -> None:
        names, virtual, package = self._names, self._virtual, module.__name__
        names.made.append(package)

        def look_up(name: str) -> Any:
            if name == "__all__":
                return virtual.public()
            value = names.look_up(package, name)
            setattr(module, name, value)
            return value

        about = f": {virtual.about}" if virtual.about else ""
        vars(module).update(
            __doc__=f"Names of Transformer Engine that lead to Fusible{about}.",
            __getattr__=look_up,
            __dir__=lambda: sorted({*vars(module), *virtual.public(), *names.below(package)}),
            **({"__version__": virtual.version} if virtual.version else {}),
        )


class _Within(importlib.abc.Loader):
    """A loader that runs the module's code within a patch; for everything else it asks the loader that was found."""

    def __init__(self, loader: importlib.abc.Loader, patch: Patch) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with self._patch(module):
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
