"""As on a machine without NVIDIA's package: its names are found nowhere, in this process or in one of its own."""

from __future__ import annotations

import sys

import pytest

from fusible.compat import finder, names

__all__ = ["HIDE", "hide"]

HIDE = """
import importlib.machinery, sys
_find = importlib.machinery.PathFinder.find_spec
_HIDDEN = ("transformer_engine", "transformer_engine_torch")
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in _HIDDEN else _find(name, *rest)
)
"""
"""What a process of its own runs first."""


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""
    for module in (finder, names):
        monkeypatch.setattr(module, "found_elsewhere", lambda name, path=None: None)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("transformer_engine", "transformer_engine_torch")]:
        monkeypatch.delitem(sys.modules, name)
