"""Which products a fused pass may take: those of one process alone, and those of which a group of processes shares out the weight."""

from __future__ import annotations

from fusible.ops import MMT, ColumnParallelMMT, RowParallelMMT

__all__ = ["OwnDx", "OwnY"]

OwnY = MMT | ColumnParallelMMT
"""Products whose y is what the process itself computes, so that the product may compute what follows too."""
OwnDx = MMT | RowParallelMMT
"""Products whose dx is what the process itself computes."""
