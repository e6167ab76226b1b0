"""``BackwardAddRMSNorm`` and ``BackwardAddLayerNorm``."""

from __future__ import annotations

from fusible.pytorch.ops.basic import LayerNorm, MakeExtraOutput, RMSNorm
from fusible.pytorch.ops.fused.base import AdaptedBackward, Part

__all__ = ["BackwardAddLayerNorm", "BackwardAddRMSNorm"]


class BackwardAddRMSNorm(AdaptedBackward):
    """Backward of a tensor that leaves before a norm: ``dx`` = the norm's gradient ``+ dextra``, added before it is rounded; ``dweight`` as ever.

    ``dy``, ``dextra`` and ``dx [*, hidden]``, ``dweight [hidden]``.
    """

    parts = (Part("add", (MakeExtraOutput,)), Part("rmsnorm", (RMSNorm,)))

    def __init__(self, *, add: MakeExtraOutput, rmsnorm: RMSNorm) -> None:
        super().__init__(add=add, rmsnorm=rmsnorm)


class BackwardAddLayerNorm(AdaptedBackward):
    """As ``BackwardAddRMSNorm``, of a ``LayerNorm``; ``dbias [hidden]`` as ever."""

    parts = (Part("add", (MakeExtraOutput,)), Part("layernorm", (LayerNorm,)))

    def __init__(self, *, add: MakeExtraOutput, layernorm: LayerNorm) -> None:
        super().__init__(add=add, layernorm=layernorm)
