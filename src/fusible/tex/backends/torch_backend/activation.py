"""Activations: one table of functions with their gradients, and what surrounds any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible.tex.backends.torch_backend.operands import flat, plain
from fusible.tex.backends.torch_backend.quantize import emit
from fusible.tex.checks import GATED, check_gradient, check_width_even
from fusible.tex.interface.activation import Activation

__all__ = ["ActivationKernels", "POINTWISE", "Pointwise"]

_gelu_backward = torch.ops.aten.gelu_backward.default
_silu_backward = torch.ops.aten.silu_backward.default
_relu_backward = torch.ops.aten.threshold_backward.default


@dataclass(frozen=True)
class Pointwise:
    """``f`` and ``(g, x) -> g * f'(x)``. ``one_kernel``: each is a single torch kernel, which computes in fp32 and rounds once whatever the dtype."""

    f: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    one_kernel: bool = False


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _dgelu(g: Tensor, x: Tensor) -> Tensor:
    return _gelu_backward(g, x, approximate="tanh")


def _qgelu(x: Tensor) -> Tensor:
    return torch.sigmoid(x * 1.702).mul_(x)


def _dqgelu(g: Tensor, x: Tensor) -> Tensor:
    scaled = x * 1.702
    return _silu_backward(g, scaled)


def _drelu(g: Tensor, x: Tensor) -> Tensor:
    return _relu_backward(g, x, 0)


def _srelu(x: Tensor) -> Tensor:
    return torch.relu(x).square_()


def _dsrelu(g: Tensor, x: Tensor) -> Tensor:
    return torch.relu(x).mul_(2).mul_(g)


def _dsigmoid(g: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.sigmoid_backward.default(g, torch.sigmoid(x))


POINTWISE: dict[str, Pointwise] = {
    "gelu": Pointwise(_gelu, _dgelu, one_kernel=True),
    "silu": Pointwise(F.silu, _silu_backward, one_kernel=True),
    "relu": Pointwise(torch.relu, _drelu, one_kernel=True),
    "qgelu": Pointwise(_qgelu, _dqgelu),
    "srelu": Pointwise(_srelu, _dsrelu),
    "sigmoid": Pointwise(torch.sigmoid, _dsigmoid),
}
"""``qgelu'``: with u = 1.702 x, ``qgelu(x) = silu(u) / 1.702``, so the derivative is that of silu at u."""


def _finish(result: Tensor, quantizer: Any, dtype: torch.dtype) -> Any:
    if quantizer is not None:
        return emit(result, quantizer, dtype)
    return result if result.dtype is dtype else result.to(dtype)


def _fp32(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float32 else x.float()


def _halves(x: Tensor, function: str) -> tuple[Tensor, Tensor]:
    check_width_even(x, function)
    width = x.shape[-1]
    a, b = x.split(width // 2, -1) if width else (x, x)
    return _fp32(a), _fp32(b)


def _forward(name: str) -> Callable[..., Any]:
    entry = POINTWISE[name]
    f, one_kernel = entry.f, entry.one_kernel

    def forward(self: Any, input: Any, quantizer: Any) -> Any:
        x = plain(input)
        if quantizer is None and one_kernel:
            return f(x)
        return _finish(f(_fp32(x)), quantizer, x.dtype)

    return forward


def _backward(name: str) -> Callable[..., Any]:
    entry = POINTWISE[name]
    gradient, one_kernel, function = entry.gradient, entry.one_kernel, f"d{name}"

    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: Any) -> Any:
        g, x = plain(grad), plain(fwd_input)
        check_gradient(g, x.shape, function)
        if quantizer is None and one_kernel and g.dtype is x.dtype:
            return gradient(g, x)
        return _finish(gradient(_fp32(g), _fp32(x)), quantizer, x.dtype)

    return backward


def _backward_with_bias(name: str) -> Callable[..., Any]:
    gradient, function = POINTWISE[name].gradient, f"dbias_d{name}"

    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: Any) -> list[Any]:
        g, x = plain(grad), plain(fwd_input)
        check_gradient(g, x.shape, function)
        dx = gradient(_fp32(g), _fp32(x))
        bias_grad = flat(dx).sum(0)
        return [bias_grad if g.dtype is torch.float32 else bias_grad.to(g.dtype), _finish(dx, quantizer, g.dtype)]

    return backward


def _gated_forward(function: str) -> Callable[..., Any]:
    f = POINTWISE[GATED[function]].f

    def forward(self: Any, input: Any, quantizer: Any) -> Any:
        x = plain(input)
        a, b = _halves(x, function)
        return _finish(f(a).mul_(b), quantizer, x.dtype)

    return forward


def _gated_backward(function: str) -> Callable[..., Any]:
    entry = POINTWISE[GATED[function]]
    f, gradient = entry.f, entry.gradient

    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: Any) -> Any:
        g, x = plain(grad), plain(fwd_input)
        a, b = _halves(x, f"d{function}")
        check_gradient(g, a.shape, f"d{function}")
        g = _fp32(g)
        return _finish(torch.cat((gradient(g * b, a), f(a).mul_(g)), -1), quantizer, x.dtype)

    return backward


class ActivationKernels(Activation):
    gelu, dgelu, dbias_dgelu = _forward("gelu"), _backward("gelu"), _backward_with_bias("gelu")
    silu, dsilu, dbias_dsilu = _forward("silu"), _backward("silu"), _backward_with_bias("silu")
    relu, drelu, dbias_drelu = _forward("relu"), _backward("relu"), _backward_with_bias("relu")
    qgelu, dqgelu, dbias_dqgelu = _forward("qgelu"), _backward("qgelu"), _backward_with_bias("qgelu")
    srelu, dsrelu, dbias_dsrelu = _forward("srelu"), _backward("srelu"), _backward_with_bias("srelu")
    glu, dglu = _gated_forward("glu"), _gated_backward("glu")
    geglu, dgeglu = _gated_forward("geglu"), _gated_backward("geglu")
    qgeglu, dqgeglu = _gated_forward("qgeglu"), _gated_backward("qgeglu")
    reglu, dreglu = _gated_forward("reglu"), _gated_backward("reglu")
    sreglu, dsreglu = _gated_forward("sreglu"), _gated_backward("sreglu")
    swiglu, dswiglu = _gated_forward("swiglu"), _gated_backward("swiglu")

    def situglu(self, input: Any, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
        x = plain(input)
        a, b = _halves(x, "situglu")
        gate = torch.tanh(a / beta1).mul_(beta1).mul_(torch.sigmoid(a))
        return _finish(gate.mul_(torch.tanh(b / beta2).mul_(beta2)), quantizer, x.dtype)

    def dsituglu(self, grad: Any, fwd_input: Any, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
        g, x = plain(grad), plain(fwd_input)
        a, b = _halves(x, "dsituglu")
        check_gradient(g, a.shape, "dsituglu")
        g = _fp32(g)
        t, s, u = torch.tanh(a / beta1), torch.sigmoid(a), torch.tanh(b / beta2)
        da = g * ((1 - t * t) * s + beta1 * t * s * (1 - s)) * (beta2 * u)
        db = g * (1 - u * u) * (beta1 * t * s)
        return _finish(torch.cat((da, db), -1), quantizer, x.dtype)

    def clamped_swiglu(self, input: Any, quantizer: Any, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> Any:
        x = plain(input)
        a, b = _halves(x, "clamped_swiglu")
        c = a.clamp_max(limit)
        return _finish(torch.sigmoid(c * alpha).mul_(c).mul_(b.clamp(-limit, limit).add_(glu_linear_offset)), quantizer, x.dtype)

    def clamped_dswiglu(
        self, grad: Any, fwd_input: Any, quantizer: Any, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0
    ) -> Any:
        g, x = plain(grad), plain(fwd_input)
        a, b = _halves(x, "clamped_dswiglu")
        check_gradient(g, a.shape, "clamped_dswiglu")
        g = _fp32(g)
        c = a.clamp_max(limit)
        s = torch.sigmoid(c * alpha)
        up = b.clamp(-limit, limit).add_(glu_linear_offset)
        da = torch.where(a <= limit, g * up * (s + alpha * c * s * (1 - s)), 0.0)
        db = torch.where(b.abs() <= limit, g * c * s, 0.0)
        return _finish(torch.cat((da, db), -1), quantizer, x.dtype)
