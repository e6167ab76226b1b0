"""Layer and RMS normalization by the compiled kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.operands import plain
from fusible.tex.backends.cpu.output import produce
from fusible.tex.calls.checks import check_norm_backward, check_norm_parameter, check_norm_statistic
from fusible.tex.enums import DType
from fusible.tex.interface.declare import Request, requires
from fusible.tex.interface.normalization import Normalization
from fusible.tex.interface.prim import Prim
from fusible.tex.protocol import check_shape, outer, to_torch

__all__ = ["NormalizationKernels"]

_WRITES = frozenset({torch.float32, torch.float16, torch.bfloat16, DType.kFloat32, DType.kFloat16, DType.kBFloat16})


def _to_wide_floats(request: Request) -> str | None:
    otype = request["otype"]
    return None if otype in _WRITES else f"writes float32, bfloat16 and float16, and otype is {otype}"


class NormalizationKernels(Normalization, Prim):
    @requires(_to_wide_floats)
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
        check_norm_parameter(gamma, x, "weight of layernorm_fwd")
        if bias is not None:
            bias = plain(bias)
            check_norm_parameter(bias, x, "bias of layernorm_fwd")
        mu = _statistic(x)
        rsigma = torch.empty_like(mu)
        operands = (x, gamma, bias, mu, rsigma, eps, zero_centered_gamma)
        return [produce(native.norm_fwd, operands, x.shape, to_torch(otype), quantizer, ln_out, x), mu, rsigma]

    def layernorm_bwd(self, dz: Any, x: Any, mu: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool) -> list[Any]:
        return _layernorm_backward(plain(dz), plain(x), None, mu, rsigma, plain(gamma), zero_centered_gamma, "layernorm_bwd")

    def prim_layernorm_bwd_add(
        self, dz: Any, x: Any, add: Any, mu: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool
    ) -> list[Any]:
        function, x, add = "prim.layernorm_bwd_add", plain(x), plain(add)
        check_shape(add, x.shape, f"add of {function}")
        return _layernorm_backward(plain(dz), x, add, mu, rsigma, plain(gamma), zero_centered_gamma, function)

    @requires(_to_wide_floats)
    def rmsnorm_fwd(
        self, input: Any, weight: Any, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int, zero_centered_gamma: bool
    ) -> list[Any]:
        x, gamma = plain(input), plain(weight)
        check_norm_parameter(gamma, x, "weight of rmsnorm_fwd")
        rsigma = _statistic(x)
        operands = (x, gamma, None, None, rsigma, eps, zero_centered_gamma)
        return [produce(native.norm_fwd, operands, x.shape, to_torch(otype), quantizer, ln_out, x), None, rsigma]

    def rmsnorm_bwd(self, dz: Any, x: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool) -> list[Any]:
        return _rmsnorm_backward(plain(dz), plain(x), None, rsigma, plain(gamma), zero_centered_gamma, "rmsnorm_bwd")

    def rmsnorm_bwd_add(self, dz: Any, x: Any, add: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool) -> list[Any]:
        x, add = plain(x), plain(add)
        check_shape(add, x.shape, "add of rmsnorm_bwd_add")
        return _rmsnorm_backward(plain(dz), x, add, rsigma, plain(gamma), zero_centered_gamma, "rmsnorm_bwd_add")


def _layernorm_backward(
    dz: Tensor, x: Tensor, add: Tensor | None, mu: Tensor, rsigma: Tensor, gamma: Tensor, zero_centered: bool, function: str
) -> list[Tensor]:
    check_norm_backward(dz, x, rsigma, gamma, function)
    check_norm_statistic(mu, x, f"mu of {function}")
    dx, dgamma, dbeta = torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)
    native.norm_bwd(dz, x, mu.contiguous(), rsigma.contiguous(), gamma, zero_centered, dx, dgamma, dbeta, add)
    return [dx, dgamma, dbeta]


def _rmsnorm_backward(dz: Tensor, x: Tensor, add: Tensor | None, rsigma: Tensor, gamma: Tensor, zero_centered: bool, function: str) -> list[Tensor]:
    check_norm_backward(dz, x, rsigma, gamma, function)
    dx, dgamma = torch.empty_like(x), torch.empty_like(gamma)
    native.norm_bwd(dz, x, None, rsigma.contiguous(), gamma, zero_centered, dx, dgamma, None, add)
    return [dx, dgamma]


def _statistic(x: Tensor) -> Tensor:
    rows = outer(x.shape)
    return x.new_empty(rows) if x.dtype is torch.float32 else torch.empty(rows, dtype=torch.float32)
