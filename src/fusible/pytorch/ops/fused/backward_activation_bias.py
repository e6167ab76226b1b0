"""``BackwardActivationBias``."""

from __future__ import annotations

from typing import Any

from fusible.pytorch.ops.basic import GELU, QGELU, Bias, ReLU, SiLU, SReLU
from fusible.pytorch.ops.fused.base import AdaptedBackward, Part, replaced
from fusible.pytorch.ops.op import FusibleOperation

__all__ = ["BackwardActivationBias"]


class BackwardActivationBias(AdaptedBackward):
    """Backward of a bias and an activation: ``dx = dy * activation'(x + bias)``, and ``dbias`` = the sum of ``dx`` over all rows, from one read.

    ``dx`` is written in the quantized type that the operation before asks for, and summed before it is quantized. GELU, QGELU, ReLU, SiLU and SReLU.
    ``dy`` and ``dx [*, size]``, ``dbias [size]``.
    """

    parts = (Part("bias", (Bias,)), Part("activation", (GELU, QGELU, ReLU, SiLU, SReLU)))

    def __init__(self, *, bias: Bias, activation: GELU | QGELU | ReLU | SiLU | SReLU) -> None:
        super().__init__(bias=bias, activation=activation)

    @staticmethod
    def fuse_backward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """``ops`` with each ``Bias + activation`` put together, under any recipe and without one."""
        return replaced(BackwardActivationBias, ops)
