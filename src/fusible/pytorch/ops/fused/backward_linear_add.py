"""``BackwardLinearAdd``."""

from __future__ import annotations

from fusible.pytorch.ops.basic import BasicLinear, MakeExtraOutput
from fusible.pytorch.ops.fused.base import AdaptedBackward, Part

__all__ = ["BackwardLinearAdd"]


class BackwardLinearAdd(AdaptedBackward):
    """Backward of a tensor that leaves before a linear layer: ``dx = dy @ weight + dextra``, summed in fp32 and rounded once; ``dweight = dy.T @ x``.

    ``dy [*, out_features]``, ``dextra`` and ``dx [*, in_features]``. ``dextra`` keeps its values, whether or not ``backward_add`` is in place.
    """

    parts = (Part("backward_add", (MakeExtraOutput,)), Part("linear", (BasicLinear,)))

    def __init__(self, *, backward_add: MakeExtraOutput, linear: BasicLinear) -> None:
        super().__init__(backward_add=backward_add, linear=linear)
