"""``UserbuffersForwardLinear``."""

from __future__ import annotations

from typing import Any

from fusible.errors import NotServedError, expected
from fusible.pytorch.ops.op import FusedOperation, FusibleOperation

__all__ = ["UserbuffersForwardLinear"]


class UserbuffersForwardLinear(FusedOperation):
    """A tensor-parallel linear layer whose forward overlaps its products with their communication, piece by piece.

    That takes communication buffers which several GPUs map (``CommOverlap`` of tex), and products that start on a piece as it arrives. No backend has
    them, so that none can be made, and ``fuse_forward_ops`` finds nothing. The basic operations compute the same, one after another.
    """

    def __init__(self, *, linear: Any, bias: Any, reduce_scatter: Any) -> None:
        """Raises ``NotServedError``."""
        of, do = "UserbuffersForwardLinear", "leave BasicLinear, Bias and ReduceScatter as they are"
        raise NotServedError(expected("a backend that overlaps communication buffers with products", of=of, got="none", do=do))

    @staticmethod
    def fuse_forward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """``ops``: nothing is put together."""
        return ops
