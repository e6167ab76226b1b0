"""Tensors that are many in one: their quantization and their products."""

from __future__ import annotations

from fusible.tex.interface.grouped import Grouped

__all__ = ["GroupedKernels"]


class GroupedKernels(Grouped):
    """Tensors that are many in one: their quantization and their products."""
