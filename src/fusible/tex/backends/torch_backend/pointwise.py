"""The activation functions and their gradients in fp32: elementwise ones, and gates of two operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible.tex.calls.checks import GATED

__all__ = ["GATES", "Gate", "POINTWISE", "Pointwise"]

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


@dataclass(frozen=True)
class Gate:
    """``f(a, b, *options)`` of fp32 operands, a new tensor, and ``gradient(g, a, b, *options)``: those for ``a`` and ``b``."""

    f: Callable[..., Tensor]
    gradient: Callable[..., tuple[Tensor, Tensor]]


def _gate_of(entry: Pointwise) -> Gate:
    def f(a: Tensor, b: Tensor) -> Tensor:
        return entry.f(a).mul_(b)

    def gradient(g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return entry.gradient(g * b, a), entry.f(a).mul_(g)

    return Gate(f, gradient)


def _situglu(a: Tensor, b: Tensor, beta1: float, beta2: float) -> Tensor:
    gate = torch.tanh(a / beta1).mul_(beta1).mul_(torch.sigmoid(a))
    return gate.mul_(torch.tanh(b / beta2).mul_(beta2))


def _dsituglu(g: Tensor, a: Tensor, b: Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    t, s, u = torch.tanh(a / beta1), torch.sigmoid(a), torch.tanh(b / beta2)
    da = g * ((1 - t * t) * s + beta1 * t * s * (1 - s)) * (beta2 * u)
    return da, g * (1 - u * u) * (beta1 * t * s)


def _clamped_swiglu(a: Tensor, b: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    c = a.clamp_max(limit)
    return torch.sigmoid(c * alpha).mul_(c).mul_(b.clamp(-limit, limit).add_(offset))


def _clamped_dswiglu(g: Tensor, a: Tensor, b: Tensor, limit: float, alpha: float, offset: float) -> tuple[Tensor, Tensor]:
    c = a.clamp_max(limit)
    s = torch.sigmoid(c * alpha)
    up = b.clamp(-limit, limit).add_(offset)
    da = torch.where(a <= limit, g * up * (s + alpha * c * s * (1 - s)), 0.0)
    return da, torch.where(b.abs() <= limit, g * c * s, 0.0)


GATES: dict[str, Gate] = {
    **{name: _gate_of(POINTWISE[activation]) for name, activation in GATED.items()},
    "situglu": Gate(_situglu, _dsituglu),
    "clamped_swiglu": Gate(_clamped_swiglu, _clamped_dswiglu),
}
"""``act(a) * b`` of every gated activation, the last two with options (``beta1``, ``beta2``; ``limit``, ``alpha``, the offset of ``b``)."""
