"""The activation functions and their gradients, wide: elementwise ones, and gates of two operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusible.tex.calls.checks import GATED
from fusible.tex.formulas.arrays import Arrays

__all__ = ["Gate", "Pointwise", "gates", "pointwise"]

_BETA = math.sqrt(2 / math.pi)
_KAPPA = 0.044715


@dataclass(frozen=True)
class Pointwise:
    """``f``, a new tensor, and ``(g, x) -> g * f'(x)``. ``one_kernel``: each is a single kernel of the framework, which rounds once whatever the
    dtype."""

    f: Callable[[Any], Any]
    gradient: Callable[[Any, Any], Any]
    one_kernel: bool = False


@dataclass(frozen=True)
class Gate:
    """``f(a, b, *options)``, a new tensor, and ``gradient(g, a, b, *options)``: those for ``a`` and ``b``."""

    f: Callable[..., Any]
    gradient: Callable[..., tuple[Any, Any]]


def pointwise(xp: Arrays) -> dict[str, Pointwise]:
    """Every elementwise activation by its name in tex, and the logistic function, whose gate is GLU."""

    def tanh_of_gelu(x: Any) -> Any:
        return xp.tanh((x * (x * x * _KAPPA + 1.0)) * _BETA)

    def gelu(x: Any) -> Any:
        return x * 0.5 * (tanh_of_gelu(x) + 1.0)

    def dgelu(g: Any, x: Any) -> Any:
        t = tanh_of_gelu(x)
        inner = (x * x * (3 * _KAPPA) + 1.0) * _BETA
        return g * ((t + 1.0) * 0.5 + x * 0.5 * (1.0 - t * t) * inner)

    def dsilu(g: Any, x: Any) -> Any:
        s = xp.sigmoid(x)
        return g * s * (x * (1.0 - s) + 1.0)

    def dsigmoid(g: Any, x: Any) -> Any:
        s = xp.sigmoid(x)
        return g * (1.0 - s) * s

    def srelu(x: Any) -> Any:
        y = xp.relu(x)
        return xp.times(y, y)

    return {
        "gelu": Pointwise(gelu, dgelu),
        "silu": Pointwise(lambda x: x * xp.sigmoid(x), dsilu),
        "relu": Pointwise(xp.relu, lambda g, x: xp.where(x <= 0.0, 0.0, g)),
        # With u = 1.702 x, qgelu(x) = silu(u) / 1.702: its derivative is that of silu at u.
        "qgelu": Pointwise(lambda x: x * xp.sigmoid(x * 1.702), lambda g, x: dsilu(g, x * 1.702)),
        "srelu": Pointwise(srelu, lambda g, x: g * xp.times(xp.relu(x), 2.0)),
        "sigmoid": Pointwise(xp.sigmoid, dsigmoid),
    }


def gates(xp: Arrays, pointwise: Mapping[str, Pointwise]) -> dict[str, Gate]:
    """``act(a) * b`` of every gated activation, the last two with options (``beta1``, ``beta2``; ``limit``, ``alpha``, the offset of ``b``)."""

    def gate_of(activation: Pointwise) -> Gate:
        def f(a: Any, b: Any) -> Any:
            return xp.times(activation.f(a), b)

        def gradient(g: Any, a: Any, b: Any) -> tuple[Any, Any]:
            return activation.gradient(g * b, a), xp.times(activation.f(a), g)

        return Gate(f, gradient)

    def situglu(a: Any, b: Any, beta1: float, beta2: float) -> Any:
        gate = xp.times(xp.times(xp.tanh(a / beta1), beta1), xp.sigmoid(a))
        return xp.times(gate, xp.times(xp.tanh(b / beta2), beta2))

    def dsituglu(g: Any, a: Any, b: Any, beta1: float, beta2: float) -> tuple[Any, Any]:
        t, s, u = xp.tanh(a / beta1), xp.sigmoid(a), xp.tanh(b / beta2)
        da = g * ((1.0 - t * t) * s + t * beta1 * s * (1.0 - s)) * (u * beta2)
        return da, g * (1.0 - u * u) * (t * beta1 * s)

    def clamped_swiglu(a: Any, b: Any, limit: float, alpha: float, offset: float) -> Any:
        c = xp.clip(a, None, limit)
        return xp.times(xp.times(xp.sigmoid(c * alpha), c), xp.plus(xp.clip(b, -limit, limit), offset))

    def clamped_dswiglu(g: Any, a: Any, b: Any, limit: float, alpha: float, offset: float) -> tuple[Any, Any]:
        c = xp.clip(a, None, limit)
        s = xp.sigmoid(c * alpha)
        up = xp.plus(xp.clip(b, -limit, limit), offset)
        da = xp.where(a <= limit, g * up * (s + c * alpha * s * (1.0 - s)), 0.0)
        return da, xp.where(xp.abs(b) <= limit, g * c * s, 0.0)

    return {
        **{name: gate_of(pointwise[activation]) for name, activation in GATED.items()},
        "situglu": Gate(situglu, dsituglu),
        "clamped_swiglu": Gate(clamped_swiglu, clamped_dswiglu),
    }
