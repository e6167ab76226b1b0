"""What NVIDIA's Python package computes by Triton kernels, by torch: on a CPU those would run in Triton's interpreter, a Python call for each
operation of theirs.

A module here has the functions of the module of ``transformer_engine.pytorch.triton`` whose name it has, with their parameters. Of such a function
the package calls the one here for tensors of the host, and its own for all others.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from fusible.compat.finder import Patch

__all__ = ["TRITON_PATCHES"]

_PACKAGE = "transformer_engine.pytorch.triton"


def _on_host(own: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """``own`` for tensors of the host, else ``theirs``."""
    theirs = getattr(theirs, "__wrapped__", theirs)  # of a module that was loaded before, and adapted then

    @functools.wraps(theirs)
    def served(*arguments: Any, **named: Any) -> Any:
        first = next(x for x in (*arguments, *named.values()) if isinstance(x, torch.Tensor))
        return (own if first.is_cpu else theirs)(*arguments, **named)

    return served


def _patch(name: str) -> Patch:
    @contextmanager
    def around(module: ModuleType) -> Iterator[None]:
        yield
        ours = importlib.import_module(f"{__name__}.{name}")
        for function in ours.__all__:
            setattr(module, function, _on_host(getattr(ours, function), getattr(module, function)))

    return around


TRITON_PATCHES: dict[str, Patch] = {f"{_PACKAGE}.{name}": _patch(name) for name in ("cross_entropy", "grouped_dbias_dscales", "pad", "permutation")}
"""By module of the package: what is done around it."""
