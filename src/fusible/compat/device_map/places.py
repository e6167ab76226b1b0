"""Replacing functions of torch: everywhere, as many of its modules import functions of others by name, and with changed arguments."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

__all__ = ["everywhere", "loaded", "with_arguments"]


def loaded(package: str) -> list[ModuleType]:
    """The modules of ``package`` that are loaded, itself first: ``sys.modules`` has thousands, so ask once for all names."""
    return [module for path, module in sorted(sys.modules.items()) if path == package or path.startswith(f"{package}.")]


def everywhere(modules: Iterable[ModuleType], former: Any, name: str, value: Any) -> Iterator[tuple[Any, str, Any]]:
    """``(module, name, value)`` of each of ``modules`` that has ``former`` under ``name``."""
    for module in modules:
        if vars(module).get(name) is former:
            yield module, name, value


def with_arguments(function: Callable[..., Any], change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """``function``, whose arguments ``change`` sees by name before each call, those alone that are given, and alters in place."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        change(bound.arguments)
        return function(*bound.args, **bound.kwargs)

    return call
