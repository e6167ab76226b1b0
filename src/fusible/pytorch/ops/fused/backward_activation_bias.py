"""``BackwardActivationBias``."""

from __future__ import annotations

from fusible.pytorch.ops import basic
from fusible.pytorch.ops.basic import Bias
from fusible.pytorch.ops.fused.base import AdaptedBackward, Part
from fusible.pytorch.ops.op import BasicOperation
from fusible.tex.activations import ELEMENTWISE

__all__ = ["BackwardActivationBias"]


class BackwardActivationBias(AdaptedBackward):
    """Backward of a bias and an activation: ``dx = dy * activation'(x + bias)``, and ``dbias`` = the sum of ``dx`` over all rows, from one read.

    ``dx`` is written in the quantized type that the operation before asks for, and summed before it is quantized. The activation is an elementwise
    one. ``dy`` and ``dx [*, size]``, ``dbias [size]``.
    """

    parts = (Part("bias", (Bias,)), Part("activation", tuple(getattr(basic, row.nvidias_title) for row in ELEMENTWISE)))

    def __init__(self, *, bias: Bias, activation: BasicOperation) -> None:
        super().__init__(bias=bias, activation=activation)
