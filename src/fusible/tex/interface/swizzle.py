"""The order of block scales that matrix products of NVIDIA read."""

from __future__ import annotations

__all__ = ["Swizzle"]


class Swizzle:
    """The order of block scales that matrix products of NVIDIA read."""
