"""Layer and RMS normalization by the compiled kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.operands import plain
from fusible.tex.backends.cpu.output import produce
from fusible.tex.calls.normalization import NormalizationBySteps, NormGradient, NormOutput
from fusible.tex.protocol import outer, to_torch

__all__ = ["NormalizationKernels"]


class NormalizationKernels(NormalizationBySteps):
    def norm_operand(self, x: Any) -> Tensor:
        return plain(x)

    def layernorm(self, x: Tensor, gamma: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, output: NormOutput) -> list[Any]:
        mu = _statistic(x)
        rsigma = torch.empty_like(mu)
        return [_written((x, gamma, bias, mu, rsigma, eps, zero_centered), output), mu, rsigma]

    def rmsnorm(self, x: Tensor, gamma: Tensor, eps: float, zero_centered: bool, output: NormOutput) -> list[Any]:
        rsigma = _statistic(x)
        return [_written((x, gamma, None, None, rsigma, eps, zero_centered), output), None, rsigma]

    def layernorm_gradient(self, of: NormGradient) -> list[Any]:
        dx, dgamma, dbeta = torch.empty_like(of.x), torch.empty_like(of.gamma), torch.empty_like(of.gamma)
        native.norm_bwd(of.dz, of.x, of.mu.contiguous(), of.rsigma.contiguous(), of.gamma, of.zero_centered, dx, dgamma, dbeta, of.add)
        return [dx, dgamma, dbeta]

    def rmsnorm_gradient(self, of: NormGradient) -> list[Any]:
        dx, dgamma = torch.empty_like(of.x), torch.empty_like(of.gamma)
        native.norm_bwd(of.dz, of.x, None, of.rsigma.contiguous(), of.gamma, of.zero_centered, dx, dgamma, None, of.add)
        return [dx, dgamma]


def _written(operands: tuple[Any, ...], output: NormOutput) -> Any:
    x = operands[0]
    return produce(native.norm_fwd, operands, x.shape, to_torch(output.dtype), output.quantizer, output.out, x)


def _statistic(x: Tensor) -> Tensor:
    rows = outer(x.shape)
    return x.new_empty(rows) if x.dtype is torch.float32 else torch.empty(rows, dtype=torch.float32)
