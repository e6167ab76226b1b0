"""The functions that NVIDIA's Python package computes by Triton kernels, in torch: on a CPU the kernels would run in Triton's interpreter, with a
Python call for each of their operations.

A module here has the functions of the module of ``transformer_engine.pytorch.triton`` whose name it has, with their parameters. Of such a function
the package calls the one here for tensors of the host, and its own for all others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from fusible.compat.finder import Patch, after, replace

__all__ = ["TRITON_PATCHES"]

_PACKAGE = "transformer_engine.pytorch.triton"


def _on_host(own: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For ``replace``: a function that calls ``own`` for tensors of the host, and the package's for all others."""

    def made(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def served(*arguments: Any, **named: Any) -> Any:
            first = next(x for x in (*arguments, *named.values()) if isinstance(x, torch.Tensor))
            return (own if first.is_cpu else theirs)(*arguments, **named)

        return served

    return made


def _patch(name: str) -> Patch:
    def change(module: ModuleType) -> None:
        ours = importlib.import_module(f"{__name__}.{name}")
        for function in ours.__all__:
            replace(module, function, _on_host(getattr(ours, function)))

    return after(change)


TRITON_PATCHES: dict[str, Patch] = {f"{_PACKAGE}.{name}": _patch(name) for name in ("cross_entropy", "grouped_dbias_dscales", "pad", "permutation")}
"""By module of the package: what is done around it."""
