"""``ScaledTanhSReLU``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.pytorch.ops.context import OperationContext
from fusible.pytorch.ops.op import BasicOperation
from fusible.pytorch.ops.tensors import maybe_dequantize
from fusible.tex.protocol import accumulator

__all__ = ["ScaledTanhSReLU"]


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
