"""Layer and RMS normalization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.errors import DTypeError, expected
from fusible.tex.backends.torch_backend.operands import flat, plain, wide, write
from fusible.tex.backends.torch_backend.quantize import emit
from fusible.tex.calls.checks import check_norm_backward, check_norm_parameter, check_norm_statistic
from fusible.tex.formats import is_quantized
from fusible.tex.interface.normalization import Normalization
from fusible.tex.interface.prim import Prim
from fusible.tex.protocol import accumulator, check_shape, to_torch

__all__ = ["NormalizationKernels"]


class NormalizationKernels(Normalization, Prim):
    def layernorm_fwd(
        self,
        input: Any,
        weight: Any,
        bias: Any,
        eps: float,
        ln_out: Any,
        quantizer: Any,
        otype: Any,
        sm_margin: int,
        zero_centered_gamma: bool,
    ) -> list[Any]:
        x, gamma = plain(input), plain(weight)
        dtype = to_torch(otype)
        check_norm_parameter(gamma, x, "weight of layernorm_fwd")
        if bias is not None:
            check_norm_parameter(bias, x, "bias of layernorm_fwd")
            bias = _in(bias, accumulator(x.dtype))
        # torch's CPU kernel takes half-precision x with fp32 parameters, and then rounds y once and keeps fp32 statistics.
        mixed = x.is_cpu and x.dtype is dtype and quantizer is None
        y, mu, rsigma = torch.native_layer_norm(x if mixed else wide(x), gamma.shape, _scale(gamma, x, zero_centered_gamma), bias, eps)
        if not x.shape[-1]:
            mu.fill_(torch.nan)  # the mean of nothing, which torch has as 0 beside an rsigma of NaN
        return [_emit(y, quantizer, dtype, ln_out), mu.view(-1), rsigma.view(-1)]

    def layernorm_bwd(self, dz: Any, x: Any, mu: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool) -> list[Any]:
        x = plain(x)
        dx, *rest = _layernorm_backward(plain(dz), x, mu, rsigma, plain(gamma), zero_centered_gamma, "layernorm_bwd")
        return [dx.to(x.dtype), *rest]

    def prim_layernorm_bwd_add(
        self, dz: Any, x: Any, add: Any, mu: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool
    ) -> list[Any]:
        function, x, add = "prim.layernorm_bwd_add", plain(x), plain(add)
        check_shape(add, x.shape, f"add of {function}")
        dx, *rest = _layernorm_backward(plain(dz), x, mu, rsigma, plain(gamma), zero_centered_gamma, function)
        return [dx.add_(add).to(x.dtype), *rest]

    def rmsnorm_fwd(
        self, input: Any, weight: Any, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int, zero_centered_gamma: bool
    ) -> list[Any]:
        x, gamma = plain(input), plain(weight)
        check_norm_parameter(gamma, x, "weight of rmsnorm_fwd")
        rows = wide(x)
        rsigma = rows.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        y = (rows * rsigma).mul_(_scale(gamma, x, zero_centered_gamma))
        return [_emit(y, quantizer, to_torch(otype), ln_out), None, rsigma.view(-1)]

    def rmsnorm_bwd(self, dz: Any, x: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool) -> list[Any]:
        dx, dgamma = _rmsnorm_backward(plain(dz), plain(x), rsigma, plain(gamma), zero_centered_gamma, "rmsnorm_bwd")
        return [dx.to(x.dtype), dgamma]

    def rmsnorm_bwd_add(self, dz: Any, x: Any, add: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool) -> list[Any]:
        add = plain(add)
        check_shape(add, x.shape, "add of rmsnorm_bwd_add")
        dx, dgamma = _rmsnorm_backward(plain(dz), plain(x), rsigma, plain(gamma), zero_centered_gamma, "rmsnorm_bwd_add")
        return [dx.add_(add).to(x.dtype), dgamma]


def _layernorm_backward(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, zero_centered: bool, function: str
) -> tuple[Tensor, Tensor, Tensor]:
    """``dx`` not rounded yet, ``dgamma`` and ``dbeta`` in gamma's dtype."""
    check_norm_backward(dz, x, rsigma, gamma, function)
    check_norm_statistic(mu, x, f"mu of {function}")
    # torch's function reads these two as if they had no gaps.
    dtype = accumulator(x.dtype)
    mean, inverse = (_in(value, dtype).contiguous().view(*x.shape[:-1], 1) for value in (mu, rsigma))
    g = _scale(gamma, x, zero_centered)
    dx, dgamma, dbeta = torch.ops.aten.native_layer_norm_backward.default(_in(dz, dtype), wide(x), gamma.shape, mean, inverse, g, g, [True] * 3)
    return dx, dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)


def _rmsnorm_backward(dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, zero_centered: bool, function: str) -> tuple[Tensor, Tensor]:
    """``dx`` not rounded yet, and ``dgamma`` in gamma's dtype."""
    check_norm_backward(dz, x, rsigma, gamma, function)
    rs = rsigma.view(*x.shape[:-1], 1)
    dz, xh = wide(dz), wide(x) * rs
    dy = dz * _scale(gamma, x, zero_centered)
    mean = (dy * xh).mean(-1, keepdim=True)
    dx = torch.addcmul(dy, xh, mean, value=-1).mul_(rs)
    return dx, flat(xh.mul_(dz)).sum(0).to(gamma.dtype)


def _in(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def _scale(gamma: Tensor, x: Tensor, zero_centered: bool) -> Tensor:
    gamma = _in(gamma, accumulator(x.dtype))
    return gamma + 1 if zero_centered else gamma


def _emit(y: Tensor, quantizer: Any, dtype: torch.dtype, out: Any) -> Any:
    if quantizer is None:
        return write(y, dtype, out)
    if out is not None and not is_quantized(out):
        raise DTypeError(expected("a quantized tensor", of="ln_out with a quantizer", got=type(out).__qualname__, do="pass None"))
    return emit(y, quantizer, dtype, out)
