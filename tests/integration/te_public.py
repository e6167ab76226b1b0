"""The public names of NVIDIA's Python package, and who serves them: that package on tex, or Fusible under the same names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from fusible.compat.te_names import PACKAGES

__all__ = ["CASES", "MODULES", "Case", "Side", "case", "public", "sides"]

ROOT = "transformer_engine.pytorch"
MODULES = {
    "": ROOT,
    "ops": f"{ROOT}.ops",
    "optimizers": f"{ROOT}.optimizers",
    "distributed": f"{ROOT}.distributed",
    "attention": f"{ROOT}.attention",
    "rope": f"{ROOT}.attention.rope",
    "tensor": f"{ROOT}.tensor",
    "quantization": f"{ROOT}.quantization",
    "permutation": f"{ROOT}.permutation",
    "cross_entropy": f"{ROOT}.cross_entropy",
    "recipe": "transformer_engine.common.recipe",
}
"""By the name that cases have for it, each module whose names are the package's public ones."""


def public() -> dict[str, str]:
    """Every class and function that a module of ``MODULES`` has in ``__all__``, or without one by a name without an underscore: the name that cases
    have for it, once for each object; and where it is defined."""
    found: dict[int, tuple[str, str]] = {}
    for short, path in MODULES.items():
        module = importlib.import_module(path)
        for name in getattr(module, "__all__", None) or dir(module):
            value = getattr(module, name)
            home = getattr(value, "__module__", None) or ""
            if not name.startswith("_") and home.startswith("transformer_engine") and (inspect.isclass(value) or callable(value)):
                found.setdefault(id(value), (f"{short}.{name}".lstrip("."), home))
    return dict(found.values())


@dataclass
class Side:
    """One of the two that have the public names: ``find`` gives a module's; the names that were asked for are noted in ``asked``."""

    find: Callable[[str, str], Any]
    below: str = ""
    asked: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inner = f"{self.below}.{name}".lstrip(".")
        if inner in MODULES:
            return Side(self.find, inner, self.asked)
        value = self.find(MODULES[self.below], name)
        self.asked.add(inner)
        return value


def _theirs(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _ours(module: str, name: str) -> Any:
    shown = PACKAGES.get(module)
    source: ModuleType | None = None if shown is None else shown.find(name)
    if source is None:
        raise AttributeError(f"{module}.{name} is not served")
    return getattr(source, name)


def sides() -> tuple[Side, Side]:
    """NVIDIA's names within ``te_client.package()``, and ours as a machine without that package has them."""
    return Side(_theirs), Side(_ours)


@dataclass(frozen=True)
class Case:
    """``run`` asks a side for each of ``names`` and gives what came of them by names: tensors, which are equal within ``bound`` of their norm (0: to
    the bit), and other values, which are equal."""

    run: Callable[[Side], Iterator[tuple[str, Any]]]
    names: tuple[str, ...]
    bound: float = 0.0


CASES: dict[str, Case] = {}


def case(*names: str, bound: float = 0.0) -> Callable[[Callable[[Side], Iterator[tuple[str, Any]]]], Any]:
    """A function that gives the results of public names, as a case."""

    def register(run: Callable[[Side], Iterator[tuple[str, Any]]]) -> Any:
        assert run.__name__ not in CASES, run.__name__
        CASES[run.__name__] = Case(run, names, bound)
        return run

    return register
