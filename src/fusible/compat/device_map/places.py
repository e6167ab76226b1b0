"""Where torch holds what is put in place: many of its modules have functions of others as their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["everywhere"]


def everywhere(package: str, former: Any, name: str, value: Any) -> Iterator[tuple[Any, str, Any]]:
    """``(module, name, value)`` of each loaded module of ``package`` that has ``former`` under ``name``."""
    for path, module in sorted(sys.modules.items()):
        if (path == package or path.startswith(f"{package}.")) and vars(module).get(name) is former:
            yield module, name, value
