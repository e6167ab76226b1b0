"""``UserbuffersBackwardLinear``."""

from __future__ import annotations

from typing import Any

from fusible.pytorch.ops.fused.base import Overlapping
from fusible.pytorch.ops.op import FusibleOperation

__all__ = ["UserbuffersBackwardLinear"]


class UserbuffersBackwardLinear(Overlapping):
    """``Overlapping`` in backward."""

    @staticmethod
    def fuse_backward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """``ops``: nothing is put together."""
        return ops
