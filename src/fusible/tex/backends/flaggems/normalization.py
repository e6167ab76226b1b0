"""Norms by FlagGems' kernels, which compute in fp32 and give the dtype of their input: LayerNorm's its statistics as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.errors import DTypeError, expected
from fusible.tex.backends.flaggems.operands import refused
from fusible.tex.calls.checks import check_norm_backward, check_norm_parameter, check_norm_statistic
from fusible.tex.interface.declare import CallArguments, Request, by_name, requires
from fusible.tex.interface.normalization import Normalization
from fusible.tex.protocol import check_shape, to_torch
from fusible.tex.selection.dispatch import hand_over

__all__ = ["NormalizationKernels"]


def _forward_refused(request: Request) -> str | None:
    kind: Any = request["input"]
    reason = refused(request)
    if reason is None and to_torch(request["otype"]) is not kind[1]:
        reason = f"gives the dtype of its input, {kind[1]}, and otype is {request['otype']}"
    return reason


def _backward_refused(request: Request) -> str | None:
    x, gamma = request["x"], request["gamma"]
    # The kernel rounds dgamma to the dtype of x.
    return refused(request) or (None if x == gamma else "reads x and gamma of one dtype")


def _layernorm_refused(request: Request) -> str | None:
    kind: Any = request["input"]
    rounds = None if kind[1] is torch.float32 else f"gives mean and rsigma in the dtype of its input, {kind[1]}, and they are float32"
    return _forward_refused(request) or rounds


class NormalizationKernels(Normalization):
    gems: Any

    @requires(_layernorm_refused)
    @by_name
    def layernorm_fwd(self, call: CallArguments) -> list[Any]:
        x = call.input
        check_norm_parameter(call.weight, x, "weight of layernorm_fwd")
        if call.bias is not None:
            check_norm_parameter(call.bias, x, "bias of layernorm_fwd")
        if call.ln_out is not None:
            _check_output(call.ln_out, x)
        if not x.numel():
            return hand_over(self, "layernorm_fwd", **vars(call))  # type: ignore[arg-type]
        y, mu, rsigma = self.gems.layer_norm(x, [x.shape[-1]], _scale(call.weight, call.zero_centered_gamma), call.bias, call.eps)
        return [y if call.ln_out is None else call.ln_out.copy_(y), mu, rsigma]

    @requires(refused)
    @by_name
    def layernorm_bwd(self, call: CallArguments) -> list[Any]:
        x, gamma = call.x, call.gamma
        check_norm_backward(call.dz, x, call.rsigma, gamma, "layernorm_bwd")
        check_norm_statistic(call.mu, x, "mu of layernorm_bwd")
        if not x.numel():
            return hand_over(self, "layernorm_bwd", **vars(call))  # type: ignore[arg-type]
        rows, scale = (x.numel() // x.shape[-1], x.shape[-1]), _scale(gamma, call.zero_centered_gamma)
        # The kernel takes rows, and gives the gradient of the bias in the dtype of a bias, of which it reads nothing else.
        statistics = call.mu.reshape(-1), call.rsigma.reshape(-1)
        dx, dgamma, dbeta = self.gems.layer_norm_backward(
            call.dz.reshape(rows), x.reshape(rows), [x.shape[-1]], *statistics, scale, scale, [True, True, True]
        )
        return [dx.view(x.shape), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)]

    @requires(_forward_refused)
    @by_name
    def rmsnorm_fwd(self, call: CallArguments) -> list[Any]:
        x, out = call.input, call.ln_out
        check_norm_parameter(call.weight, x, "weight of rmsnorm_fwd")
        if out is not None:
            _check_output(out, x)
        y, rsigma = self.gems.rms_norm_forward(x, [x.shape[-1]], _scale(call.weight, call.zero_centered_gamma), call.eps)
        return [y if out is None else out.copy_(y), None, rsigma]

    @requires(_backward_refused)
    def rmsnorm_bwd(self, dz: Any, x: Any, rsigma: Any, gamma: Any, zero_centered_gamma: bool) -> list[Any]:
        check_norm_backward(dz, x, rsigma, gamma, "rmsnorm_bwd")
        return list(self.gems.rms_norm_backward(dz, x, rsigma, [x.shape[-1]], _scale(gamma, zero_centered_gamma), 0.0))


def _scale(gamma: Tensor, zero_centered: bool) -> Tensor:
    return gamma.float() + 1 if zero_centered else gamma


def _check_output(out: Any, like: Tensor) -> None:
    if not isinstance(out, torch.Tensor) or out.dtype is not like.dtype:
        got = getattr(out, "dtype", type(out).__qualname__)
        raise DTypeError(expected(str(like.dtype), of="the given output", got=got, do="pass a tensor of that dtype"))
    check_shape(out, like.shape, "the given output")
