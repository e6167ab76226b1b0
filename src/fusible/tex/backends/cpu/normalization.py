"""Layer and RMS normalization by the compiled kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.kernel_calls import call as kernel_call
from fusible.tex.backends.cpu.kernel_calls import specialized
from fusible.tex.backends.cpu.layouts import HOST, PLAIN_CLASSES, as_read
from fusible.tex.backends.cpu.operands import plain
from fusible.tex.backends.cpu.output import produce
from fusible.tex.calls.normalization import NormalizationBySteps, NormGradient, NormOutput
from fusible.tex.interface.declare import CallArguments, inherited
from fusible.tex.interface.kernel_calls import Buffer
from fusible.tex.interface.specialize import SpecializedCall, specialized_by
from fusible.tex.protocol import outer, to_torch

__all__ = ["NormalizationKernels"]


def _writes_like(x: Tensor, call: CallArguments) -> bool:
    """Whether a norm gives a plain tensor of the type of its operand, which is read as it lies."""
    return call.ln_out is None and call.quantizer is None and as_read(x, call.weight) and to_torch(call.otype) is x.dtype


def _layernorm_specialized(self: Any, call: CallArguments) -> SpecializedCall | None:
    return _norm(call, call.bias, Buffer(torch.float32, (outer(call.input.shape),))) if call.bias is None or as_read(call.bias) else None


def _rmsnorm_specialized(self: Any, call: CallArguments) -> SpecializedCall | None:
    return _norm(call, None, None)


def _norm(call: CallArguments, bias: Tensor | None, mu: Buffer | None) -> SpecializedCall | None:
    x: Tensor = call.input
    if not _writes_like(x, call):
        return None
    y, rsigma = Buffer(x.dtype, tuple(x.shape)), Buffer(torch.float32, (outer(x.shape),))
    options = {"eps": call.eps, "zero_centered_gamma": call.zero_centered_gamma, "dtype": x.dtype}
    return specialized([y, mu, rsigma], kernel_call("norm_fwd", x=x, weight=call.weight, bias=bias, mu=mu, rsigma=rsigma, dst=y, **options))


def _layernorm_gradient_specialized(self: Any, call: CallArguments) -> SpecializedCall | None:
    return _norm_gradient(call, call.mu, Buffer(call.gamma.dtype, tuple(call.gamma.shape)))


def _rmsnorm_gradient_specialized(self: Any, call: CallArguments) -> SpecializedCall | None:
    return _norm_gradient(call, None, None)


def _norm_gradient(call: CallArguments, mu: Tensor | None, dbeta: Buffer | None) -> SpecializedCall | None:
    """The gradient ``dz`` alone may be laid out otherwise than it is read, as that of a sum is."""
    dz, x, gamma, add = call.dz, call.x, call.gamma, getattr(call, "add", None)
    if type(dz) not in PLAIN_CLASSES or not dz.is_cpu or not as_read(x, call.rsigma, gamma, *(t for t in (mu, add) if t is not None)):
        return None
    dx, dgamma, lying = Buffer(x.dtype, tuple(x.shape)), Buffer(gamma.dtype, tuple(gamma.shape)), dz
    copied = []
    if not dz.is_contiguous():
        lying = Buffer(dz.dtype, tuple(dz.shape))
        copied = [kernel_call("copy", src=dz, dst=lying)]
    written = {"dx": dx, "dgamma": dgamma, "dbeta": dbeta, "zero_centered_gamma": call.zero_centered_gamma}
    gradient = kernel_call("norm_bwd", dz=lying, x=x, mu=mu, rsigma=call.rsigma, weight=gamma, add=add, **written)
    return specialized([dx, dgamma] if dbeta is None else [dx, dgamma, dbeta], *copied, gradient)


class NormalizationKernels(NormalizationBySteps):
    layernorm_fwd = specialized_by(_layernorm_specialized)(inherited(NormalizationBySteps.layernorm_fwd))
    layernorm_bwd = specialized_by(_layernorm_gradient_specialized)(inherited(NormalizationBySteps.layernorm_bwd))
    prim_layernorm_bwd_add = specialized_by(_layernorm_gradient_specialized)(inherited(NormalizationBySteps.prim_layernorm_bwd_add))
    rmsnorm_fwd = specialized_by(_rmsnorm_specialized)(inherited(NormalizationBySteps.rmsnorm_fwd))
    rmsnorm_bwd = specialized_by(_rmsnorm_gradient_specialized)(inherited(NormalizationBySteps.rmsnorm_bwd))
    rmsnorm_bwd_add = specialized_by(_rmsnorm_gradient_specialized)(inherited(NormalizationBySteps.rmsnorm_bwd_add))

    def norm_operand(self, x: Any) -> Tensor:
        return x.contiguous() if type(x) in PLAIN_CLASSES else plain(x)

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
    x, (quantizer, dtype, out) = operands[0], output
    if quantizer is None and out is None and dtype is x.dtype:  # of small tensors, the call is most of the time
        y = torch.empty_like(x)
        x, gamma, bias, mu, rsigma, eps, zero_centered = operands
        native.norm_fwd(x, gamma, bias, mu, rsigma, eps, zero_centered, y, dtype)
        return y
    return produce(native.norm_fwd, operands, x.shape, to_torch(dtype), quantizer, out, x)


def _statistic(x: Tensor) -> Tensor:
    shape = x.shape
    rows = shape[0] if len(shape) == 2 else outer(shape)
    return x.new_empty(rows) if x.dtype is torch.float32 else torch.empty(rows, dtype=torch.float32, device=HOST)
