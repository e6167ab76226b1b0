"""The activations as modules; each is the op of its name."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from fusible import ops
from fusible.pytorch.modules.base import BaseModule

__all__ = ["GELU", "GLU", "GeGLU", "QGELU", "QGeGLU", "ReGLU", "ReLU", "SReGLU", "SReLU", "SiLU", "SwiGLU"]


class _Activation(BaseModule):
    op: ClassVar[type[ops.Activation]]

    def __init__(self) -> None:
        nn.Module.__init__(self)
        super().__init__(self.op())


class GELU(_Activation):
    """``x * Phi(x)`` by the tanh approximation."""

    op = ops.GELU


class QGELU(_Activation):
    """``x * sigmoid(1.702 x)``."""

    op = ops.QGELU


class ReLU(_Activation):
    """``max(x, 0)``."""

    op = ops.ReLU


class SiLU(_Activation):
    """``x * sigmoid(x)``."""

    op = ops.SiLU


class SReLU(_Activation):
    """``max(x, 0)^2``."""

    op = ops.SReLU


class GLU(_Activation):
    """``sigmoid(a) * b`` of the two halves ``[a | b]`` of the last dimension, which it halves."""

    op = ops.GLU


class GeGLU(_Activation):
    """``gelu(a) * b`` of the two halves ``[a | b]`` of the last dimension, which it halves."""

    op = ops.GeGLU


class QGeGLU(_Activation):
    """``qgelu(a) * b`` of the two halves ``[a | b]`` of the last dimension, which it halves."""

    op = ops.QGeGLU


class ReGLU(_Activation):
    """``relu(a) * b`` of the two halves ``[a | b]`` of the last dimension, which it halves."""

    op = ops.ReGLU


class SReGLU(_Activation):
    """``srelu(a) * b`` of the two halves ``[a | b]`` of the last dimension, which it halves."""

    op = ops.SReGLU


class SwiGLU(_Activation):
    """``silu(a) * b`` of the two halves ``[a | b]`` of the last dimension, which it halves."""

    op = ops.SwiGLU
