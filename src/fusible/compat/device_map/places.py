"""Where torch holds what is put in place: many of its modules have functions of others as their own."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

__all__ = ["everywhere", "loaded"]


def loaded(package: str) -> list[ModuleType]:
    """The modules of ``package`` that are loaded, itself first: ``sys.modules`` has thousands, so ask once for all names."""
    return [module for path, module in sorted(sys.modules.items()) if path == package or path.startswith(f"{package}.")]


def everywhere(modules: Iterable[ModuleType], former: Any, name: str, value: Any) -> Iterator[tuple[Any, str, Any]]:
    """``(module, name, value)`` of each of ``modules`` that has ``former`` under ``name``."""
    for module in modules:
        if vars(module).get(name) is former:
            yield module, name, value
