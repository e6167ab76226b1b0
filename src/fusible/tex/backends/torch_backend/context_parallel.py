"""Packed sequences that are divided between devices."""

from __future__ import annotations

from fusible.tex.interface.context_parallel import ContextParallel

__all__ = ["ContextParallelKernels"]


class ContextParallelKernels(ContextParallel):
    """Packed sequences that are divided between devices."""
