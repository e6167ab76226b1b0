"""Mixture of experts: tokens to their experts and back, and the router."""

from __future__ import annotations

from fusible.tex.interface.moe import MoE

__all__ = ["MoEKernels"]


class MoEKernels(MoE):
    """Mixture of experts: tokens to their experts and back, and the router."""
