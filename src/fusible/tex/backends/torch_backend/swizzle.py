"""The order of block scales that matrix products of NVIDIA read."""

from __future__ import annotations

from fusible.tex.interface.swizzle import Swizzle

__all__ = ["SwizzleKernels"]


class SwizzleKernels(Swizzle):
    """The order of block scales that matrix products of NVIDIA read."""
