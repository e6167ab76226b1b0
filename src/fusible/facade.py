"""How a package says what it offers: a name stands in the ``__all__`` of the module that has it, and the package gathers its modules' names."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

__all__ = ["public_names"]


def public_names(namespace: Mapping[str, Any], *modules: str) -> list[str]:
    """A package's ``__all__``, from its ``globals()``: the names without a leading underscore, in lexicographic order. Of submodules, which Python
    puts beside them when they are loaded, those of ``modules`` alone."""
    own = {name for name, value in namespace.items() if not name.startswith("_") and not isinstance(value, ModuleType)}
    return sorted(own - {"annotations"} | {*modules})
