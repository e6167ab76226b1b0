"""Fusible as a plugin of NVIDIA's package: with ``NVTE_PLUGIN=fusible.plugin``, its import puts tex in the native module's place.

The package loads its native library first and keeps it at ``transformer_engine_torch_nv``, where the nvidia backend finds it.
"""

from __future__ import annotations

import sys

from fusible import tex

__all__ = ["load_plugins"]


def load_plugins() -> None:
    """Make ``transformer_engine_torch`` tex: called by NVIDIA's package once its own library is loaded."""
    sys.modules["transformer_engine_torch"] = tex
    tex.registry.changed()
