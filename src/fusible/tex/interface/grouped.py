"""Tensors that are many in one: their quantization and their products."""

from __future__ import annotations

__all__ = ["Grouped"]


class Grouped:
    """Tensors that are many in one: their quantization and their products."""
