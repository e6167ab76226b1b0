"""Running scripts that were written for Transformer Engine: its names, its Python package, its checkpoints, and its GPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fusible.compat.device_map import cuda_on_cpu
from fusible.compat.names import install, installed, uninstall

if TYPE_CHECKING:
    from fusible.compat.nvidia_files import operations_from_nvidia, operations_to_nvidia, read_state_dict, write_state_dict

__all__ = [
    "cuda_on_cpu",
    "install",
    "installed",
    "operations_from_nvidia",
    "operations_to_nvidia",
    "read_state_dict",
    "uninstall",
    "write_state_dict",
]


def __getattr__(name: str) -> Any:
    """What reads and writes files knows ``fusible.pytorch``, which ``install`` is not to load."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("fusible.compat.nvidia_files"), name)
