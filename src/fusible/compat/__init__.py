"""Running scripts that were written for Transformer Engine: its names, its Python package, and its GPU."""

from __future__ import annotations

from fusible.compat.device_map import cuda_on_cpu
from fusible.compat.names import install, installed, uninstall
from fusible.compat.nvidia_files import operations_from_nvidia, operations_to_nvidia, read_checkpoint, write_checkpoint

__all__ = [
    "cuda_on_cpu",
    "install",
    "installed",
    "operations_from_nvidia",
    "operations_to_nvidia",
    "read_checkpoint",
    "uninstall",
    "write_checkpoint",
]
