"""Casting slices of sharded master weights to 8 and 4 bits, and the scales of NVFP4."""

from __future__ import annotations

__all__ = ["ShardedCast"]


class ShardedCast:
    """Casting slices of sharded master weights to 8 and 4 bits, and the scales of NVFP4."""
