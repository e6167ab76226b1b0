"""Activations on lazy tensors: one table of functions with their gradients, and what surrounds any of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.operands import fp32, plain, row_sum
from fusible.tex.backends.xla.quantize import emit
from fusible.tex.checks import GATED, check_gradient, check_width_even
from fusible.tex.interface.activation import Activation

__all__ = ["ActivationKernels", "POINTWISE"]

_BETA = math.sqrt(2 / math.pi)
_KAPPA = 0.044715


def _gelu_gate(x: Tensor) -> Tensor:
    return lazy.tanh((x * (x * x * _KAPPA + 1.0)) * _BETA)


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (_gelu_gate(x) + 1.0)


def _dgelu(g: Tensor, x: Tensor) -> Tensor:
    t = _gelu_gate(x)
    inner = (x * x * (3 * _KAPPA) + 1.0) * _BETA
    return g * ((t + 1.0) * 0.5 + x * 0.5 * (1.0 - t * t) * inner)


def _silu(x: Tensor) -> Tensor:
    return x * lazy.sigmoid(x)


def _dsilu(g: Tensor, x: Tensor) -> Tensor:
    s = lazy.sigmoid(x)
    return g * s * (x * (1.0 - s) + 1.0)


def _dsigmoid(g: Tensor, x: Tensor) -> Tensor:
    s = lazy.sigmoid(x)
    return g * (1.0 - s) * s


def _relu(x: Tensor) -> Tensor:
    return lazy.maximum(x, 0.0)


def _drelu(g: Tensor, x: Tensor) -> Tensor:
    return lazy.where(x <= 0.0, 0.0, g)


def _srelu(x: Tensor) -> Tensor:
    y = _relu(x)
    return y * y


POINTWISE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (_gelu, _dgelu),
    "silu": (_silu, _dsilu),
    "relu": (_relu, _drelu),
    "qgelu": (lambda x: x * lazy.sigmoid(x * 1.702), lambda g, x: _dsilu(g, x * 1.702)),
    "srelu": (_srelu, lambda g, x: g * (_relu(x) * 2.0)),
    "sigmoid": (lazy.sigmoid, _dsigmoid),
}
"""``f`` and ``(g, x) -> g * f'(x)``, in fp32. With u = 1.702 x, ``qgelu(x) = silu(u) / 1.702``, so its derivative is that of silu at u."""


def _finish(result: Tensor, quantizer: Any, dtype: lazy.dtype) -> Any:
    return lazy.cast(result, dtype) if quantizer is None else emit(result, quantizer, dtype)


def _halves(x: Tensor, function: str) -> tuple[Tensor, Tensor]:
    check_width_even(x, function)
    width = x.shape[-1]
    a, b = lazy.split(fp32(x), [width // 2, width // 2], -1)
    return a, b


def _forward(name: str) -> Callable[..., Any]:
    f, _ = POINTWISE[name]

    def forward(self: Any, input: Any, quantizer: Any) -> Any:
        x = plain(input)
        return _finish(f(fp32(x)), quantizer, x.dtype)

    return forward


def _backward(name: str) -> Callable[..., Any]:
    _, gradient = POINTWISE[name]

    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: Any) -> Any:
        g, x = plain(grad), plain(fwd_input)
        check_gradient(g, x.shape, f"d{name}")
        return _finish(gradient(fp32(g), fp32(x)), quantizer, x.dtype)

    return backward


def _backward_with_bias(name: str) -> Callable[..., Any]:
    _, gradient = POINTWISE[name]

    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: Any) -> list[Any]:
        g, x = plain(grad), plain(fwd_input)
        check_gradient(g, x.shape, f"dbias_d{name}")
        dx = gradient(fp32(g), fp32(x))
        return [lazy.cast(row_sum(dx), g.dtype), _finish(dx, quantizer, g.dtype)]

    return backward


def _gated_forward(function: str) -> Callable[..., Any]:
    f, _ = POINTWISE[GATED[function]]

    def forward(self: Any, input: Any, quantizer: Any) -> Any:
        x = plain(input)
        a, b = _halves(x, function)
        return _finish(f(a) * b, quantizer, x.dtype)

    return forward


def _gated_backward(function: str) -> Callable[..., Any]:
    f, gradient = POINTWISE[GATED[function]]

    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: Any) -> Any:
        g, x = plain(grad), plain(fwd_input)
        a, b = _halves(x, f"d{function}")
        check_gradient(g, a.shape, f"d{function}")
        g = fp32(g)
        return _finish(lazy.concatenate([gradient(g * b, a), f(a) * g], -1), quantizer, x.dtype)

    return backward


def _clamp(x: Tensor, limit: float) -> Tensor:
    return lazy.maximum(lazy.minimum(x, limit), -limit)


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
        gate = lazy.tanh(a / beta1) * beta1 * lazy.sigmoid(a)
        return _finish(gate * (lazy.tanh(b / beta2) * beta2), quantizer, x.dtype)

    def dsituglu(self, grad: Any, fwd_input: Any, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
        g, x = plain(grad), plain(fwd_input)
        a, b = _halves(x, "dsituglu")
        check_gradient(g, a.shape, "dsituglu")
        g = fp32(g)
        t, s, u = lazy.tanh(a / beta1), lazy.sigmoid(a), lazy.tanh(b / beta2)
        da = g * ((1.0 - t * t) * s + t * beta1 * s * (1.0 - s)) * (u * beta2)
        db = g * (1.0 - u * u) * (t * beta1 * s)
        return _finish(lazy.concatenate([da, db], -1), quantizer, x.dtype)

    def clamped_swiglu(self, input: Any, quantizer: Any, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> Any:
        x = plain(input)
        a, b = _halves(x, "clamped_swiglu")
        c = lazy.minimum(a, limit)
        return _finish(lazy.sigmoid(c * alpha) * c * (_clamp(b, limit) + glu_linear_offset), quantizer, x.dtype)

    def clamped_dswiglu(
        self, grad: Any, fwd_input: Any, quantizer: Any, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0
    ) -> Any:
        g, x = plain(grad), plain(fwd_input)
        a, b = _halves(x, "clamped_dswiglu")
        check_gradient(g, a.shape, "clamped_dswiglu")
        g = fp32(g)
        c = lazy.minimum(a, limit)
        s = lazy.sigmoid(c * alpha)
        up = _clamp(b, limit) + glu_linear_offset
        da = lazy.where(a <= limit, g * up * (s + c * alpha * s * (1.0 - s)), 0.0)
        db = lazy.where(lazy.abs(b) <= limit, g * c * s, 0.0)
        return _finish(lazy.concatenate([da, db], -1), quantizer, x.dtype)
