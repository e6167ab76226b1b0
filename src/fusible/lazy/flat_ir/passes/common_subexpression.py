"""Merging operations that compute the same."""

from __future__ import annotations

from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.flat_ir.passes.rewrite import merge_equal

__all__ = ["common_subexpression"]


def common_subexpression(flat: FlatIR) -> FlatIR:
    """Keep the first of all operations of one class with equal attributes, the same operands and the same output types (constants included)."""
    return merge_equal(flat)
