"""``BackwardLinearScale``."""

from __future__ import annotations

from fusible.pytorch.ops.basic import BasicLinear, ConstantScale
from fusible.pytorch.ops.fused.base import AdaptedBackward, Part

__all__ = ["BackwardLinearScale"]


class BackwardLinearScale(AdaptedBackward):
    """Backward of a linear layer and a factor: ``dx = scale * (dy @ weight)``, ``dweight = scale * (dy.T @ x)``, each rounded once.

    A ``dy`` that the products read quantized is scaled before it is quantized: its amax is that of the scaled one. ``dy [*, out_features]``,
    ``dx [*, in_features]``.
    """

    parts = (Part("linear", (BasicLinear,)), Part("scale", (ConstantScale,)))

    def __init__(self, *, linear: BasicLinear, scale: ConstantScale) -> None:
        super().__init__(linear=linear, scale=scale)
