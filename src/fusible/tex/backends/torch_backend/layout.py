"""Movements, paddings and allocations of plain tensors, and the offsets of what is put side by side."""

from __future__ import annotations

from fusible.tex.interface.layout import Layout

__all__ = ["LayoutKernels"]


class LayoutKernels(Layout):
    """Movements, paddings and allocations of plain tensors, and the offsets of what is put side by side."""
