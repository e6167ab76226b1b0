"""The activation functions and their gradients, wide: elementwise ones, and gates of two operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusible.tex.activations import ELEMENTWISE, GATES, Activation
from fusible.tex.formulas.arrays import Array, Arrays

__all__ = ["Functions", "Gate", "Pointwise"]

_BETA = math.sqrt(2 / math.pi)
_KAPPA = 0.044715
_SQRT_HALF = math.sqrt(0.5)


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


class Functions:
    """Each activation and its gradient as methods, by their names in tex, computed with the functions of ``xp``.

    An elementwise activation has ``name(x)`` and ``dname(g, x)``. A gate with a formula of its own has ``name(a, b, *options)``, and ``dname(g, a, b,
    *options)``, which gives the gradients for ``a`` and for ``b``; the options come in the order of its row. ``kernels`` replace the formulas of
    these names.
    """

    def __init__(self, xp: Arrays, kernels: Mapping[str, Pointwise] | None = None) -> None:
        self.xp = xp
        names = {row.name: row.gradient for row in ELEMENTWISE} | {"sigmoid": "dsigmoid"}
        self.pointwise = {name: Pointwise(getattr(self, name), getattr(self, gradient)) for name, gradient in names.items()} | dict(kernels or {})
        """Every elementwise activation by its name, and the logistic function, whose gate is GLU."""
        self.gates = {row.name: self._gate(row) for row in GATES}
        """Every gated activation by its name."""

    def _gate(self, row: Activation) -> Gate:
        if not row.of:
            return Gate(getattr(self, row.name), getattr(self, row.gradient))
        times, activation = self.xp.times, self.pointwise[row.of]

        def f(a: Array, b: Array) -> Any:
            return times(activation.f(a), b)

        def gradient(g: Array, a: Array, b: Array) -> tuple[Any, Any]:
            return activation.gradient(g * b, a), times(activation.f(a), g)

        return Gate(f, gradient)

    def _tanh_of_gelu(self, x: Array) -> Any:
        return self.xp.tanh((x * (x * x * _KAPPA + 1.0)) * _BETA)

    def gelu(self, x: Array) -> Any:
        return x * 0.5 * (self._tanh_of_gelu(x) + 1.0)

    def dgelu(self, g: Array, x: Array) -> Any:
        t = self._tanh_of_gelu(x)
        bounded = self.xp.clip(x, -16.0, 16.0)  # t is 1 or -1 from there on, so that a large slope is no product of 0 and infinity
        inner = (bounded * bounded * (3 * _KAPPA) + 1.0) * _BETA
        return g * ((t + 1.0) * 0.5 + x * 0.5 * (1.0 - t * t) * inner)

    def _phi(self, x: Array) -> Any:
        """The normal distribution function, by erfc: for negative ``x``, ``1 + erf`` would cancel."""
        return self.xp.times(self.xp.erfc(x * -_SQRT_HALF), 0.5)

    def erf_gelu(self, x: Array) -> Any:
        return self.xp.times(self._phi(x), x)

    def erf_dgelu(self, g: Array, x: Array) -> Any:
        density = self.xp.times(self.xp.exp(x * x * -0.5), _BETA / 2)
        return g * self.xp.plus_product(self._phi(x), x, density)

    def sigmoid(self, x: Array) -> Any:
        return self.xp.sigmoid(x)

    def dsigmoid(self, g: Array, x: Array) -> Any:
        s = self.xp.sigmoid(x)
        return g * (1.0 - s) * s

    def silu(self, x: Array) -> Any:
        return x * self.xp.sigmoid(x)

    def dsilu(self, g: Array, x: Array) -> Any:
        s = self.xp.sigmoid(x)
        return g * s * (x * (1.0 - s) + 1.0)

    def qgelu(self, x: Array) -> Any:
        return self.xp.times(self.xp.sigmoid(x * 1.702), x)

    def dqgelu(self, g: Array, x: Array) -> Any:
        # With u = 1.702 x, qgelu(x) = silu(u) / 1.702: its derivative is that of silu at u; far out, where u would be infinite, too.
        return self.pointwise["silu"].gradient(g, self.xp.clip(x * 1.702, -1e38, 1e38))

    def relu(self, x: Array) -> Any:
        return self.xp.relu(x)

    def drelu(self, g: Array, x: Array) -> Any:
        return self.xp.where(x <= 0.0, 0.0, g)

    def srelu(self, x: Array) -> Any:
        y = self.xp.relu(x)
        return self.xp.times(y, y)

    def dsrelu(self, g: Array, x: Array) -> Any:
        return self.xp.times(self.xp.times(self.xp.relu(x), 2.0), g)

    def situglu(self, a: Array, b: Array, beta1: float, beta2: float) -> Any:
        xp = self.xp
        gate = xp.times(xp.times(xp.tanh(a / beta1), beta1), xp.sigmoid(a))
        return xp.times(gate, xp.times(xp.tanh(b / beta2), beta2))

    def dsituglu(self, g: Array, a: Array, b: Array, beta1: float, beta2: float) -> tuple[Any, Any]:
        xp = self.xp
        t, s, u = xp.tanh(a / beta1), xp.sigmoid(a), xp.tanh(b / beta2)
        da = g * ((1.0 - t * t) * s + t * beta1 * s * (1.0 - s)) * (u * beta2)
        return da, g * (1.0 - u * u) * (t * beta1 * s)

    def clamped_swiglu(self, a: Array, b: Array, limit: float, alpha: float, offset: float) -> Any:
        xp, c = self.xp, self.xp.clip(a, None, limit)
        return xp.times(xp.times(xp.sigmoid(c * alpha), c), xp.plus(xp.clip(b, -limit, limit), offset))

    def clamped_dswiglu(self, g: Array, a: Array, b: Array, limit: float, alpha: float, offset: float) -> tuple[Any, Any]:
        xp, c = self.xp, self.xp.clip(a, None, limit)
        s = xp.sigmoid(c * alpha)
        up = xp.plus(xp.clip(b, -limit, limit), offset)
        da = xp.where(a <= limit, g * up * (s + c * alpha * s * (1.0 - s)), 0.0)
        return da, xp.where(xp.abs(b) <= limit, g * c * s, 0.0)
