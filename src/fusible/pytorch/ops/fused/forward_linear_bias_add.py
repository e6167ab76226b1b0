"""``ForwardLinearBiasAdd``."""

from __future__ import annotations

from fusible.pytorch.ops.basic import AddExtraInput, BasicLinear, Bias
from fusible.pytorch.ops.fused.base import AdaptedForward, Part

__all__ = ["ForwardLinearBiasAdd"]


class ForwardLinearBiasAdd(AdaptedForward):
    """Forward ``y = x @ weight.T + bias + extra``: the product starts from the extra input, and the sum is rounded once.

    ``x [*, in_features]``, ``extra`` and ``y [*, out_features]``. The extra input keeps its values, whether or not ``add`` is in place.
    """

    parts = (Part("linear", (BasicLinear,)), Part("bias", (Bias,), optional=True), Part("add", (AddExtraInput,)))

    def __init__(self, *, linear: BasicLinear, bias: Bias | None, add: AddExtraInput) -> None:
        super().__init__(linear=linear, bias=bias, add=add)
