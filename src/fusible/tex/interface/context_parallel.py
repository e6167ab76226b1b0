"""Packed sequences that are divided between devices."""

from __future__ import annotations

__all__ = ["ContextParallel"]


class ContextParallel:
    """Packed sequences that are divided between devices."""
