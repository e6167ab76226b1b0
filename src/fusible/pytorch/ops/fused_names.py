"""The classes of fused operations for what the engine fuses by itself, shown to whoever reads a fuser's operations."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.pytorch.ops import fused
from fusible.pytorch.ops.op import FusibleOperation
from fusible.pytorch.ops.registration import Kind

__all__ = ["by_name"]


def by_name(kind: Kind, ops: Sequence[FusibleOperation]) -> list[FusibleOperation]:
    """``ops`` with those that the engine has a fused forward, or a fused backward, of as fused operations."""
    found = list(ops)
    if kind == "forward":
        for forward in (fused.ForwardLinearBiasAdd, fused.ForwardLinearBiasActivation, fused.ForwardLinearScaleAdd):
            found = forward.fuse_forward_ops(found)
        return found
    for backward in (fused.BackwardLinearAdd, fused.BackwardLinearScale, fused.BackwardActivationBias, fused.BackwardAddRMSNorm):
        found = backward.fuse_backward_ops(found)
    return found
