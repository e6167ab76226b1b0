"""The activations as operations; each is the op of its name. Gated ones take ``[*, 2 H]`` and give ``[*, H]``: the first half activated, times the
second."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from fusible import ops
from fusible.errors import ArgumentError, ShapeError, expected
from fusible.ops import Op
from fusible.pytorch.ops.context import OperationContext
from fusible.pytorch.ops.op import BasicOperation
from fusible.pytorch.ops.tensors import maybe_dequantize
from fusible.tex.protocol import accumulator

__all__ = ["GEGLU", "GELU", "GLU", "QGEGLU", "QGELU", "ReGLU", "ReLU", "SReGLU", "SReLU", "ScaledSReLU", "ScaledTanhSReLU", "SiLU"]


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


class ScaledTanhSReLU(BasicOperation):
    """``(s tanh(max(x, 0) / s))^2 * scales`` with ``s = tanh_clamp_scale`` and the extra input ``scales [rows]``, which has a gradient: a squared
    ReLU that goes smoothly to ``s^2``. In fp32 with one rounding, and of fp64 in fp64.

    In plain torch, as tex has no such function: it is neither replayed nor compiled. Raises ``ArgumentError`` where ``s`` is not finite and positive.
    """

    num_extra_inputs = 1

    def __init__(self, *, tanh_clamp_scale: float, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        if not (math.isfinite(tanh_clamp_scale) and tanh_clamp_scale > 0):
            do = "give where the values are to end"
            raise ArgumentError(expected("a finite positive number", of="tanh_clamp_scale", got=tanh_clamp_scale, do=do))
        self.tanh_clamp_scale, self.activation_recompute_in_mlp = float(tanh_clamp_scale), activation_recompute_in_mlp

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: torch.Tensor, *, basic_op_extra_inputs: list[tuple[torch.Tensor, ...]], **unused: Any
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        x, scales = maybe_dequantize(input_), maybe_dequantize(basic_op_extra_inputs[0][0])
        if scales.numel() != x[..., 0].numel():
            of, got = f"the scales of {type(self).__name__}", list(scales.shape)
            raise ShapeError(expected(f"one number for each of {x[..., 0].numel()} rows", of=of, got=got, do="give every row one"))
        ctx = basic_op_ctxs[0]
        if ctx.requires_grad:
            ctx.save_for_backward(x, scales)
            told = {"dtype": x.dtype, "input_requires_grad": True, "extra_input_requires_grad": basic_op_extra_inputs[0][0].requires_grad}
            vars(ctx).update(told)  # what a backward that is written for the package's reads
        clamped = self.tanh_clamp_scale * self._tanh(x, self.tanh_clamp_scale)
        return (clamped.square() * _wide(scales).view(*x.shape[:-1], 1)).to(x.dtype), [()]

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, **unused: Any
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor | None]], Iterable[Iterable[torch.Tensor | None]]]:
        assert basic_op_ctxs[0].saved_tensors is not None
        (x, scales), clamp = basic_op_ctxs[0].saved_tensors, self.tanh_clamp_scale
        dy, tanh = _wide(maybe_dequantize(grad_output)), self._tanh(x, clamp)
        dscales = (dy * (clamp * tanh).square()).sum(-1).view(scales.shape).to(scales.dtype)
        dx = dy * _wide(scales).view(*x.shape[:-1], 1) * (2 * clamp * tanh * (1 - tanh.square()))
        return dx.to(x.dtype), [()], [(dscales,)]

    @staticmethod
    def _tanh(x: torch.Tensor, clamp: float) -> torch.Tensor:
        return torch.tanh(torch.relu(_wide(x)) / clamp)

    def extra_repr(self) -> str:
        return f"tanh_clamp_scale={self.tanh_clamp_scale:g}"


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(accumulator(x.dtype))
