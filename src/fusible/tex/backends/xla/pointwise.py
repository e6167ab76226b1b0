"""The activation functions of lazy tensors and their gradients, in fp32: elementwise ones, and gates of two operands."""

from __future__ import annotations

import math
from collections.abc import Callable

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.calls.checks import GATED

__all__ = ["GATES", "POINTWISE"]

Pointwise = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
Gate = tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]

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


POINTWISE: dict[str, Pointwise] = {
    "gelu": (_gelu, _dgelu),
    "silu": (_silu, _dsilu),
    "relu": (_relu, _drelu),
    "qgelu": (lambda x: x * lazy.sigmoid(x * 1.702), lambda g, x: _dsilu(g, x * 1.702)),
    "srelu": (_srelu, lambda g, x: g * (_relu(x) * 2.0)),
    "sigmoid": (lazy.sigmoid, _dsigmoid),
}
"""``f`` and ``(g, x) -> g * f'(x)``. With u = 1.702 x, ``qgelu(x) = silu(u) / 1.702``, so its derivative is that of silu at u."""


def _gate_of(entry: Pointwise) -> Gate:
    f, gradient = entry
    return lambda a, b: f(a) * b, lambda g, a, b: (gradient(g * b, a), f(a) * g)


def _situglu(a: Tensor, b: Tensor, beta1: float, beta2: float) -> Tensor:
    gate = lazy.tanh(a / beta1) * beta1 * lazy.sigmoid(a)
    return gate * (lazy.tanh(b / beta2) * beta2)


def _dsituglu(g: Tensor, a: Tensor, b: Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    t, s, u = lazy.tanh(a / beta1), lazy.sigmoid(a), lazy.tanh(b / beta2)
    da = g * ((1.0 - t * t) * s + t * beta1 * s * (1.0 - s)) * (u * beta2)
    return da, g * (1.0 - u * u) * (t * beta1 * s)


def _clamp(x: Tensor, limit: float) -> Tensor:
    return lazy.maximum(lazy.minimum(x, limit), -limit)


def _clamped_swiglu(a: Tensor, b: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    c = lazy.minimum(a, limit)
    return lazy.sigmoid(c * alpha) * c * (_clamp(b, limit) + offset)


def _clamped_dswiglu(g: Tensor, a: Tensor, b: Tensor, limit: float, alpha: float, offset: float) -> tuple[Tensor, Tensor]:
    c = lazy.minimum(a, limit)
    s = lazy.sigmoid(c * alpha)
    da = lazy.where(a <= limit, g * (_clamp(b, limit) + offset) * (s + c * alpha * s * (1.0 - s)), 0.0)
    return da, lazy.where(lazy.abs(b) <= limit, g * c * s, 0.0)


GATES: dict[str, Gate] = {
    **{name: _gate_of(POINTWISE[activation]) for name, activation in GATED.items()},
    "situglu": (_situglu, _dsituglu),
    "clamped_swiglu": (_clamped_swiglu, _clamped_dswiglu),
}
"""``f(a, b, *options)``, and ``(g, a, b, *options)`` to the gradients of ``a`` and ``b``."""
