"""``ForwardLinearScaleAdd``."""

from __future__ import annotations

from fusible.pytorch.ops.basic import AddExtraInput, BasicLinear, ConstantScale
from fusible.pytorch.ops.fused.base import AdaptedForward, Part

__all__ = ["ForwardLinearScaleAdd"]


class ForwardLinearScaleAdd(AdaptedForward):
    """Forward ``y = scale * (x @ weight.T) + extra``: the product takes the factor and starts from the extra input; the sum is rounded once.

    ``x [*, in_features]``, ``extra`` and ``y [*, out_features]``. The extra input keeps its values, whether or not ``add`` is in place.
    """

    parts = (Part("linear", (BasicLinear,)), Part("scale", (ConstantScale,)), Part("add", (AddExtraInput,)))

    def __init__(self, *, linear: BasicLinear, scale: ConstantScale, add: AddExtraInput) -> None:
        super().__init__(linear=linear, scale=scale, add=add)
