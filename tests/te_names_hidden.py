"""As on a machine without NVIDIA's package: its names are found nowhere, in this process or in one of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fusible import tex
from fusible.compat import finder, names
from fusible.plugin.hooks import HOOKS

__all__ = ["HIDE", "hide", "restored"]

HIDE = """
import importlib.machinery, sys
_find = importlib.machinery.PathFinder.find_spec
_HIDDEN = ("transformer_engine", "transformer_engine_torch")
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in _HIDDEN else _find(name, *rest)
)
"""
"""What a process of its own runs first."""


@contextmanager
def restored() -> Iterator[None]:
    """Modules of Transformer Engine, finders, and the hooks that tex was given are afterwards what they were."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _NAMES}
    finders, hooks = list(sys.meta_path), {name: vars(tex)[name] for name in HOOKS if name in vars(tex)}
    try:
        yield
    finally:
        sys.meta_path[:] = finders
        for name in [name for name in sys.modules if name.partition(".")[0] in _NAMES]:
            del sys.modules[name]
        sys.modules.update(modules)
        for name in HOOKS:
            vars(tex).pop(name, None)
        vars(tex).update(hooks)
        tex.registry.changed()


_NAMES = ("transformer_engine", "transformer_engine_torch", "transformer_engine_torch_nv")


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""
    for module in (finder, names):
        monkeypatch.setattr(module, "found_elsewhere", lambda name, path=None: None)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("transformer_engine", "transformer_engine_torch")]:
        monkeypatch.delitem(sys.modules, name)
