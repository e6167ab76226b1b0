"""Patches by which NVIDIA's package runs on tex, applied as its modules are loaded."""

from __future__ import annotations

import sys

from fusible.compat.finder import Names, adapt_loaded
from fusible.compat.nvidia_package import PATCHES, TENSOR_PATCHES
from fusible.tex.selection.registry import registry

__all__ = ["apply_patches"]

_LOADER = "transformer_engine.common"
"""The module that loads the native library; it has done so before it calls a plugin, and is not patched."""


def apply_patches() -> None:
    """Have backends make the package's own quantized tensors, and its modules ask tex where no native library serves; a second call does nothing.

    Where the nvidia backend can run, what the package asks of the device it goes on asking of NVIDIA's library.
    """
    if any(isinstance(finder, Names) and TENSOR_PATCHES.keys() <= finder.patches.keys() for finder in sys.meta_path):
        return
    native = registry.reason_unavailable(registry.find("nvidia")) is None
    patches = TENSOR_PATCHES if native else {name: adapt for name, adapt in PATCHES.items() if name != _LOADER}
    sys.meta_path.insert(0, Names(patches=patches))
    adapt_loaded(patches)
