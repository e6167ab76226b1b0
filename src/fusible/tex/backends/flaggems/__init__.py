"""FlagGems: Triton kernels for the accelerators of many vendors, called function by function, where the package and a device for it are there."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from fusible.tex.backends.flaggems.attention import AttentionKernels
from fusible.tex.backends.flaggems.gemm import GemmKernels
from fusible.tex.backends.flaggems.normalization import NormalizationKernels
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import Request
from fusible.tex.registry import registry

__all__ = ["FlagGemsBackend", "load"]


@functools.cache
def load() -> Any:
    """The package, or why it cannot be used, found out once: importing it looks for devices by running programs, and raises where it finds none."""
    if importlib.util.find_spec("flag_gems") is None:
        return "flag_gems is not installed"
    try:
        return importlib.import_module("flag_gems")
    except Exception as error:
        return f"flag_gems cannot be loaded: {type(error).__name__}: {error}".splitlines()[0]


@registry.register_backend
class FlagGemsBackend(AttentionKernels, GemmKernels, NormalizationKernels, TEXBackendBase):
    """RMSNorm, products and attention on unquantized tensors of the device that FlagGems found."""

    NAME = "flaggems"
    VENDOR = "FlagOpen"
    KIND = "flagos"
    PRIORITY = 150

    def unavailable(self) -> str | None:
        found = load()
        return found if isinstance(found, str) else None

    @property
    def gems(self) -> Any:
        return load()

    def supports(self, request: Request) -> str | None:
        reason = super().supports(request)
        device = getattr(self.gems, "device", None)
        if reason is None and not request.devices <= {device}:
            reason = f"serves tensors on {device}, where FlagGems runs, and these are on {', '.join(sorted(request.devices))}"
        return reason
