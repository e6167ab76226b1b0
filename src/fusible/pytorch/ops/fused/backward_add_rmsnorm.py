"""``BackwardAddRMSNorm`` and ``BackwardAddLayerNorm``."""

from __future__ import annotations

from typing import Any

from fusible.pytorch.ops.basic import LayerNorm, MakeExtraOutput, RMSNorm
from fusible.pytorch.ops.fused.base import AdaptedBackward, Part, replaced
from fusible.pytorch.ops.op import FusibleOperation

__all__ = ["BackwardAddLayerNorm", "BackwardAddRMSNorm"]


class BackwardAddRMSNorm(AdaptedBackward):
    """Backward of a tensor that leaves before a norm: ``dx`` = the norm's gradient ``+ dextra``, added before it is rounded; ``dweight`` as ever.

    ``dy``, ``dextra`` and ``dx [*, hidden]``, ``dweight [hidden]``.
    """

    parts = (Part("add", (MakeExtraOutput,)), Part("rmsnorm", (RMSNorm,)))

    def __init__(self, *, add: MakeExtraOutput, rmsnorm: RMSNorm) -> None:
        super().__init__(add=add, rmsnorm=rmsnorm)

    @staticmethod
    def fuse_backward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """``ops`` with each ``MakeExtraOutput + RMSNorm`` put together."""
        return replaced(BackwardAddRMSNorm, ops)


class BackwardAddLayerNorm(AdaptedBackward):
    """As ``BackwardAddRMSNorm``, of a ``LayerNorm``; ``dbias [hidden]`` as ever."""

    parts = (Part("add", (MakeExtraOutput,)), Part("layernorm", (LayerNorm,)))

    def __init__(self, *, add: MakeExtraOutput, layernorm: LayerNorm) -> None:
        super().__init__(add=add, layernorm=layernorm)

    @staticmethod
    def fuse_backward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """``ops`` with each ``MakeExtraOutput + LayerNorm`` put together."""
        return replaced(BackwardAddLayerNorm, ops)
