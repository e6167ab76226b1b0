"""Fusible: 8-bit training and inference of transformers on every machine.

Names are loaded on first use, so that ``import fusible.lazy`` brings no torch and ``import fusible`` no jaxlib.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fusible.version import __version__ as __version__

if TYPE_CHECKING:
    from fusible import lazy as lazy
    from fusible import quantized as quantized
    from fusible import tex as tex

_ROOMS = frozenset(
    "cli compat compute_pipeline conformance cpp_extensions distributed errors fusions".split()
    + "knobs lazy locks models nvte ops plugin pytorch quantized tex".split()
)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"fusible.{name}")
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'fusible' has no attribute {name!r}")
    offered = _offered()
    if name == "__all__":
        return sorted(offered)
    if name not in offered:
        raise AttributeError(f"module 'fusible' has no attribute {name!r}")
    return getattr(offered[name], name)


def __dir__() -> list[str]:
    return sorted({"__version__", *_ROOMS, *_offered()})


def _offered() -> dict[str, ModuleType]:
    """The names for users, each with the room that has it."""
    return {name: room for room in map(importlib.import_module, ("fusible.pytorch", "fusible.models")) for name in room.__all__}
