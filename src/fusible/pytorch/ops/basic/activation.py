"""The activations as operations; each is the op of its name. Gated ones take ``[*, 2 H]`` and give ``[*, H]``: the first half activated, times the
second."""

from __future__ import annotations

from typing import ClassVar

from fusible import ops
from fusible.ops import Op
from fusible.pytorch.ops.op import BasicOperation

__all__ = ["GEGLU", "GELU", "GLU", "QGEGLU", "QGELU", "ReGLU", "ReLU", "SReGLU", "SReLU", "ScaledSReLU", "SiLU"]


class _Activation(BasicOperation):
    """``cache_quantized_input``: what backward needs of the input is kept in E4M3, scaled by its own amax: a byte per element, a less exact
    gradient."""

    op: ClassVar[type[ops.Activation]]

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input

    def make_op(self) -> Op:
        return self.op(cache_quantized_input=self.cache_quantized_input)


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
    """``sigmoid(a) * b``."""

    op = ops.GLU


class GEGLU(_Activation):
    """``gelu(a) * b``."""

    op = ops.GeGLU


class QGEGLU(_Activation):
    """``qgelu(a) * b``."""

    op = ops.QGeGLU


class ReGLU(_Activation):
    """``relu(a) * b``."""

    op = ops.ReGLU


class SReGLU(_Activation):
    """``srelu(a) * b``."""

    op = ops.SReGLU


class ScaledSReLU(BasicOperation):
    """``max(x, 0)^2 * scales`` with the extra input ``scales [rows]``. ``activation_recompute_in_mlp`` is taken for compatibility: what backward
    needs is the input in any case."""

    num_extra_inputs = 1

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def make_op(self) -> Op:
        return ops.ScaledSReLU("scales")
