"""``ForwardLinearBiasActivation``."""

from __future__ import annotations

from fusible.pytorch.ops import basic
from fusible.pytorch.ops.basic import BasicLinear, Bias
from fusible.pytorch.ops.fused.base import AdaptedForward, Part
from fusible.pytorch.ops.op import BasicOperation
from fusible.tex.activations import ACTIVATIONS

__all__ = ["ForwardLinearBiasActivation"]

_ACTIVATIONS = tuple(getattr(basic, row.nvidias_title) for row in ACTIVATIONS)


class ForwardLinearBiasActivation(AdaptedForward):
    """Forward ``y = activation(x @ weight.T + bias)``, with bias and activation both optional.

    The product adds the bias, and applies a GELU too, before anything is rounded. Another activation reads the rounded sum, and its own kernel writes
    ``y`` in the quantized type that the operation after it asks for. ``x [*, in_features]``, ``y [*, out_features]``, half as wide after a gated
    activation.
    """

    parts = (Part("linear", (BasicLinear,)), Part("bias", (Bias,), optional=True), Part("activation", _ACTIVATIONS, optional=True))

    def __init__(self, *, linear: BasicLinear, bias: Bias | None, activation: BasicOperation | None = None) -> None:
        super().__init__(linear=linear, bias=bias, activation=activation)
