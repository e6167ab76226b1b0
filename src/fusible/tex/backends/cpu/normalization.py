"""Layer and RMS normalization by the compiled kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.layouts import PLAIN, as_read
from fusible.tex.backends.cpu.operands import plain
from fusible.tex.backends.cpu.output import produce
from fusible.tex.calls.normalization import NormalizationBySteps, NormGradient, NormOutput
from fusible.tex.interface.declare import CallArguments, inherited
from fusible.tex.interface.specialize import SpecializedCall, specialized_by
from fusible.tex.protocol import outer, to_torch

__all__ = ["NormalizationKernels"]


def _writes_like(x: Tensor, call: CallArguments) -> bool:
    """Whether a norm gives a plain tensor of the type of its operand, which is read as it lies."""
    return call.ln_out is None and call.quantizer is None and as_read(x, call.weight) and to_torch(call.otype) is x.dtype


def _layernorm_specialized(self: Any, call: CallArguments) -> SpecializedCall | None:
    if not _writes_like(call.input, call) or (call.bias is not None and not as_read(call.bias)):
        return None
    kernel, dtype, rows, eps, zero_centered = native.norm_fwd, call.input.dtype, outer(call.input.shape), call.eps, call.zero_centered_gamma

    def compute(x: Tensor, gamma: Tensor, bias: Tensor | None) -> list[Any]:
        y, mu = torch.empty_like(x), torch.empty(rows, dtype=torch.float32)
        rsigma = torch.empty_like(mu)
        kernel(x, gamma, bias, mu, rsigma, eps, zero_centered, y, dtype)
        return [y, mu, rsigma]

    return SpecializedCall(compute, (call.input, call.weight, call.bias))


def _rmsnorm_specialized(self: Any, call: CallArguments) -> SpecializedCall | None:
    if not _writes_like(call.input, call):
        return None
    kernel, dtype, rows, eps, zero_centered = native.norm_fwd, call.input.dtype, outer(call.input.shape), call.eps, call.zero_centered_gamma

    def compute(x: Tensor, gamma: Tensor) -> list[Any]:
        y, rsigma = torch.empty_like(x), torch.empty(rows, dtype=torch.float32)
        kernel(x, gamma, None, None, rsigma, eps, zero_centered, y, dtype)
        return [y, None, rsigma]

    return SpecializedCall(compute, (call.input, call.weight))


def _layernorm_gradient_specialized(self: Any, call: CallArguments) -> SpecializedCall | None:
    operands = _gradient_operands(call, "dz", "x", "mu", "rsigma", "gamma")
    kernel, zero_centered = native.norm_bwd, call.zero_centered_gamma

    def compute(dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, add: Tensor | None = None) -> list[Any]:
        dx, dgamma, dbeta = torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)
        kernel(dz.contiguous(), x, mu, rsigma, gamma, zero_centered, dx, dgamma, dbeta, add)
        return [dx, dgamma, dbeta]

    return SpecializedCall(compute, operands) if operands else None


def _rmsnorm_gradient_specialized(self: Any, call: CallArguments) -> SpecializedCall | None:
    operands = _gradient_operands(call, "dz", "x", "rsigma", "gamma")
    kernel, zero_centered = native.norm_bwd, call.zero_centered_gamma

    def compute(dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, add: Tensor | None = None) -> list[Any]:
        dx, dgamma = torch.empty_like(x), torch.empty_like(gamma)
        kernel(dz.contiguous(), x, None, rsigma, gamma, zero_centered, dx, dgamma, None, add)
        return [dx, dgamma]

    return SpecializedCall(compute, operands) if operands else None


def _gradient_operands(call: CallArguments, *names: str) -> tuple[Any, ...]:
    """The arguments of these names, and ``add`` where the function has it; none where one of them is not read as it lies. The first, a gradient, may
    be laid out otherwise, as that of a sum is."""
    first, *operands = (getattr(call, name) for name in (*names, "add") if name != "add" or hasattr(call, "add"))
    return (first, *operands) if type(first) in PLAIN and first.is_cpu and as_read(*operands) else ()


class NormalizationKernels(NormalizationBySteps):
    layernorm_fwd = specialized_by(_layernorm_specialized)(inherited(NormalizationBySteps.layernorm_fwd))
    layernorm_bwd = specialized_by(_layernorm_gradient_specialized)(inherited(NormalizationBySteps.layernorm_bwd))
    prim_layernorm_bwd_add = specialized_by(_layernorm_gradient_specialized)(inherited(NormalizationBySteps.prim_layernorm_bwd_add))
    rmsnorm_fwd = specialized_by(_rmsnorm_specialized)(inherited(NormalizationBySteps.rmsnorm_fwd))
    rmsnorm_bwd = specialized_by(_rmsnorm_gradient_specialized)(inherited(NormalizationBySteps.rmsnorm_bwd))
    rmsnorm_bwd_add = specialized_by(_rmsnorm_gradient_specialized)(inherited(NormalizationBySteps.rmsnorm_bwd_add))

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
