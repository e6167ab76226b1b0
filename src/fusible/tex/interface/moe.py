"""Mixture of experts: tokens to their experts and back, and the router."""

from __future__ import annotations

__all__ = ["MoE"]


class MoE:
    """Mixture of experts: tokens to their experts and back, and the router."""
