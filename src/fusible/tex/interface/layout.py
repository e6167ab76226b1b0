"""Movements, paddings and allocations of plain tensors, and the offsets of what is put side by side."""

from __future__ import annotations

__all__ = ["Layout"]


class Layout:
    """Movements, paddings and allocations of plain tensors, and the offsets of what is put side by side."""
