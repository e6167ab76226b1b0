"""Merging equal constants."""

from __future__ import annotations

from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.flat_ir.ops import ConstantOp
from fusible.lazy.flat_ir.passes.rewrite import merge_equal

__all__ = ["constant_deduplication"]


def constant_deduplication(flat: FlatIR) -> FlatIR:
    """Keep the first of all constants of one type that are equal bit for bit (-0.0 is not 0.0; a NaN is itself)."""
    return merge_equal(flat, only=ConstantOp)
