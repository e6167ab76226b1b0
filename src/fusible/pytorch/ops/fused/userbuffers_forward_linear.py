"""``UserbuffersForwardLinear``."""

from __future__ import annotations

from typing import Any

from fusible.pytorch.ops.fused.base import Overlapping
from fusible.pytorch.ops.op import FusibleOperation

__all__ = ["UserbuffersForwardLinear"]


class UserbuffersForwardLinear(Overlapping):
    """``Overlapping`` in forward."""

    @staticmethod
    def fuse_forward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """``ops``: nothing is put together."""
        return ops
