"""Finding NVIDIA's native library, which nothing here imports before it is asked for."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import ModuleType

import torch

from fusible import knobs
from fusible.tex.enums import DType

__all__ = ["find", "is_aside", "is_ours"]

_NAME, _ASIDE = "transformer_engine_torch", "transformer_engine_torch_nv"


def is_ours(module: ModuleType) -> bool:
    """Whether a module of that name is this package under another name: its enumerations are ours."""
    return getattr(module, "DType", None) is DType


def is_aside(module: ModuleType | None) -> bool:
    """Whether NVIDIA's package has put that module aside, as a plugin's functions took its place."""
    return module is not None and sys.modules.get(_ASIDE) is module


def find() -> ModuleType | str:
    """The native module, or why there is none.

    It is looked for where NVIDIA's package puts it aside when a plugin takes its place, then under its own name; where neither is loaded, NVIDIA's
    package is asked to load it.
    """
    if knobs.TE_FL_SKIP_CUDA.get():
        return "skipped by TE_FL_SKIP_CUDA"
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "there is no NVIDIA GPU that torch can use"
    for name in (_ASIDE, _NAME):
        module = sys.modules.get(name)
        if module is not None and not is_ours(module):
            return module
    if _NAME in sys.modules:
        return f"the name {_NAME} is Fusible's here, and the native library is not loaded"
    return _load()


@functools.cache
def _load() -> ModuleType | str:
    try:
        if importlib.util.find_spec("transformer_engine") is None:
            return "transformer_engine is not installed"
        importlib.import_module("transformer_engine.pytorch")
        module = importlib.import_module(_NAME)
    except Exception as error:
        return f"transformer_engine cannot be loaded: {type(error).__name__}: {error}".splitlines()[0]
    return f"the name {_NAME} is Fusible's here" if is_ours(module) else module
