"""Casting slices of sharded master weights to 8 and 4 bits, and the scales of NVFP4."""

from __future__ import annotations

from fusible.tex.interface.sharded_cast import ShardedCast

__all__ = ["ShardedCastKernels"]


class ShardedCastKernels(ShardedCast):
    """Casting slices of sharded master weights to 8 and 4 bits, and the scales of NVFP4."""
