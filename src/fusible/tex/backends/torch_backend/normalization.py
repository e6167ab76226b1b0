"""Layer and RMS normalization in torch, LayerNorm by its own kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.kernels import TorchKernels
from fusible.tex.backends.torch_backend.operands import flat, wide
from fusible.tex.calls.normalization import NormGradient, NormOutput
from fusible.tex.formulas.normalization import NormalizationFormulas
from fusible.tex.protocol import accumulator, to_torch

__all__ = ["NormalizationKernels"]


class NormalizationKernels(TorchKernels, NormalizationFormulas):
    def layernorm(self, x: Tensor, gamma: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, output: NormOutput) -> list[Any]:
        bias = None if bias is None else _in(bias, accumulator(x.dtype))
        # torch's CPU kernel takes half-precision x with fp32 parameters, and then rounds y once and keeps fp32 statistics.
        mixed = x.is_cpu and x.dtype is to_torch(output.dtype) and output.quantizer is None
        y, mu, rsigma = torch.native_layer_norm(x if mixed else wide(x), gamma.shape, self._norm_gain(gamma, x, zero_centered), bias, eps)
        if not x.shape[-1]:
            mu.fill_(torch.nan)  # the mean of nothing, which torch has as 0 beside an rsigma of NaN
        return [self._norm_result(y, output), mu.view(-1), rsigma.view(-1)]

    def layernorm_gradient(self, of: NormGradient) -> list[Any]:
        x, gamma, dtype = of.x, of.gamma, accumulator(of.x.dtype)
        # torch's function reads these two as if they had no gaps.
        mean, inverse = (_in(value, dtype).contiguous().view(*x.shape[:-1], 1) for value in (of.mu, of.rsigma))
        g = self._norm_gain(gamma, x, of.zero_centered)
        dx, dgamma, dbeta = torch.ops.aten.native_layer_norm_backward.default(
            _in(of.dz, dtype), wide(x), gamma.shape, mean, inverse, g, g, [True] * 3
        )
        return [self._norm_gradient(dx, of), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)]

    def rmsnorm_gradient(self, of: NormGradient) -> list[Any]:
        rs = of.rsigma.view(*of.x.shape[:-1], 1)
        dz, xh = wide(of.dz), wide(of.x) * rs
        dy = dz * self._norm_gain(of.gamma, of.x, of.zero_centered)
        mean = (dy * xh).mean(-1, keepdim=True)
        dx = torch.addcmul(dy, xh, mean, value=-1).mul_(rs)
        return [self._norm_gradient(dx, of), flat(xh.mul_(dz)).sum(0).to(of.gamma.dtype)]

    def _norm_gain(self, gamma: Tensor, x: Tensor, zero_centered: bool) -> Tensor:
        gamma = _in(gamma, accumulator(x.dtype))
        return gamma + 1 if zero_centered else gamma


def _in(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)
