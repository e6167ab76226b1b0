"""The activations in float64 with the error that their terms allow, and calls of the native ones on operands at odd addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import pi, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((0, 4), (4, 0), (1, 1), (1, 7), (5, 1), (3, 16), (2, 33), (64, 64), (65, 66), (63, 130), (129, 17), (2, 1100), (1, 4100))
EPS = torch.finfo(torch.float32).eps


def sigmoid_error(y: Tensor) -> Tensor:
    """The error of ``s(y)`` in units of eps, where y is off by one: its relative condition is ``|y| (1 - s)``."""
    return torch.sigmoid(y) * (1 + y.abs() * torch.sigmoid(-y))


@dataclass(frozen=True)
class Pointwise:
    """``x**power * s(y(x))`` and its derivative; each function gives its value and its error in units of eps, term by term."""

    argument: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    power: int = 1

    def value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        factor, y = x**self.power, self.argument(x)
        return factor * torch.sigmoid(y), factor.abs() * sigmoid_error(y)

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        factor, y = x**self.power * self.slope(x), self.argument(x)
        s, rest, error = torch.sigmoid(y), torch.sigmoid(-y), sigmoid_error(y)
        # 1 - s is off by the error of s and by its own rounding; beyond y = 20 the float32 s is 1, and the product is lost.
        of_product = torch.where(y > 20, s * rest / EPS, error + s * rest)
        return s * self.power + factor * s * rest, error * self.power + factor.abs() * of_product


@dataclass(frozen=True)
class Rectified:
    """``max(x, 0)**power``, without error beyond its roundings."""

    power: int

    def value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x) ** self.power
        return y, y

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        slope = (x > 0).double() if self.power == 1 else 2 * torch.relu(x)
        return slope, slope


@dataclass(frozen=True)
class Normal:
    """``x * Phi(x)`` of the normal distribution function, and its derivative. e^(-x^2 / 2) has no condition: the power is exact in two parts."""

    def value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * self._phi(x)
        return y, y.abs() + self._lost(x)

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        phi, product = self._phi(x), x * torch.exp(-x * x / 2) / sqrt(2 * pi)
        return phi + product, phi + product.abs() + self._lost(x)

    @staticmethod
    def _phi(x: Tensor) -> Tensor:
        return 0.5 * torch.special.erfc(-x * sqrt(0.5))

    @staticmethod
    def _lost(x: Tensor) -> Tensor:
        """What is 0 below the normal numbers, at -13.2, times x."""
        return torch.where(x.abs() > 13, x.abs().clamp(max=16) * torch.finfo(torch.float32).smallest_normal / EPS, 0)


_K = 2 * sqrt(2 / pi)
POINTWISE: dict[str, Any] = {
    "gelu": Pointwise(lambda x: _K * (x + 0.044715 * x**3), lambda x: _K * (1 + 3 * 0.044715 * x**2)),
    "erf_gelu": Normal(),
    "qgelu": Pointwise(lambda x: 1.702 * x, lambda x: torch.full_like(x, 1.702)),
    "silu": Pointwise(lambda x: x, torch.ones_like),
    "sigmoid": Pointwise(lambda x: x, torch.ones_like, power=0),
    "relu": Rectified(1),
    "srelu": Rectified(2),
}
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Gate:
    """``f(a) * b``."""

    f: Any

    def value(self, a: Tensor, b: Tensor) -> Pair:
        y, error = self.f.value(a)
        return y * b, error * b.abs()

    def gradient(self, a: Tensor, b: Tensor) -> tuple[Pair, Pair]:
        slope, error = self.f.gradient(a)
        return (slope * b, error * b.abs()), self.f.value(a)


@dataclass(frozen=True)
class SituGlu:
    beta1: float = 4.0
    beta2: float = 25.0

    def value(self, a: Tensor, b: Tensor) -> Pair:
        gate, up = self.beta1 * torch.tanh(a / self.beta1), self.beta2 * torch.tanh(b / self.beta2)
        return gate * torch.sigmoid(a) * up, (gate * up).abs() * sigmoid_error(a)

    def gradient(self, a: Tensor, b: Tensor) -> tuple[Pair, Pair]:
        t, u, s, error = torch.tanh(a / self.beta1), torch.tanh(b / self.beta2), torch.sigmoid(a), sigmoid_error(a)
        da = ((1 - t * t) * s + self.beta1 * t * s * torch.sigmoid(-a)) * self.beta2 * u
        # 1 - t * t is off by eps, however small it is.
        error_da = (error + self.beta1 * t.abs() * (error + s * torch.sigmoid(-a))) * self.beta2 * u.abs()
        return (da, error_da), ((1 - u * u) * self.beta1 * t * s, self.beta1 * t.abs() * error)


@dataclass(frozen=True)
class ClampedSwiglu:
    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    def _parts(self, a: Tensor, b: Tensor) -> tuple[Pointwise, Tensor, Tensor]:
        swish = Pointwise(lambda x: self.alpha * x, lambda x: torch.full_like(x, self.alpha))
        return swish, a.clamp(max=self.limit), b.clamp(-self.limit, self.limit) + self.offset

    def value(self, a: Tensor, b: Tensor) -> Pair:
        swish, c, up = self._parts(a, b)
        y, error = swish.value(c)
        return y * up, error * up.abs()

    def gradient(self, a: Tensor, b: Tensor) -> tuple[Pair, Pair]:
        swish, c, up = self._parts(a, b)
        da, error_da = swish.gradient(c)
        db, error_db = swish.value(c)
        inside_a, inside_b = a <= self.limit, b.abs() <= self.limit
        return (da * up * inside_a, error_da * up.abs() * inside_a), (db * inside_b, error_db * inside_b)


GATED: dict[str, Any] = {
    **{name: Gate(POINTWISE[f]) for name, f in {"glu": "sigmoid", "geglu": "gelu", "erf_geglu": "erf_gelu"}.items()},
    **{name: Gate(POINTWISE[f]) for name, f in {"qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}.items()},
    "situglu": SituGlu,
    "clamped_swiglu": ClampedSwiglu,
}


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, spread: float = 2.5) -> Tensor:
    """Random numbers, one element past where memory is aligned."""
    storage = torch.empty(prod(shape) + 1, dtype=dtype)
    values = torch.randn(prod(shape) + 1, generator=torch.Generator().manual_seed(seed)) * spread
    storage.copy_(values)
    return storage[1:].view(shape)


@dataclass(frozen=True)
class Call:
    """One native function: an activation, forward or backward, with options of its formula."""

    name: str
    backward: bool
    options: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return f"d{self.name}" if self.backward else self.name

    @property
    def gated(self) -> bool:
        return self.name in GATED

    def operands(self, shape: tuple[int, int], seed: int, dtype: torch.dtype, grad_dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        rows, cols = shape
        grad = numbers(shape, grad_dtype, seed + 100, 1.0) if self.backward else None
        return grad, numbers((rows, 2 * cols) if self.gated else shape, dtype, seed)

    def shape_out(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the value, or of the incoming gradient."""
        return (*shape[:-1], shape[-1] // 2) if self.gated else shape

    def into(self, grad: Tensor | None, x: Tensor, out: Tensor | None, *arguments: Any, **named: Any) -> None:
        function = getattr(cpp_extensions, ("gated_" if self.gated else "") + "activation" + ("_backward" if self.backward else ""))
        function(self.name, *([grad] if self.backward else []), x, out, *arguments, **named, **dict(self.options))

    def __call__(self, grad: Tensor | None, x: Tensor, dtype: torch.dtype, **named: Any) -> Tensor:
        out = numbers(tuple(x.shape) if self.backward else self.shape_out(tuple(x.shape)), dtype)
        self.into(grad, x, out, dtype, **named)
        return out


def reference(call: Call, grad: Tensor | None, x: Tensor) -> Pair:
    """The result in float64, and its error in units of eps."""
    wide = x.double()
    entry = (GATED if call.gated else POINTWISE)[call.name]
    if isinstance(entry, type):
        entry = entry(**dict(call.options))
    halves = wide.tensor_split(2, -1) if call.gated else (wide,)
    if grad is None:
        return entry.value(*halves)
    g = grad.double()
    parts = entry.gradient(*halves) if call.gated else (entry.gradient(*halves),)
    return torch.cat([g * value for value, _ in parts], -1), torch.cat([g.abs() * error for _, error in parts], -1)


def close(got: Tensor, wanted: Tensor, error: Tensor, dtype: torch.dtype) -> None:
    """Within four times the error of the terms (each is computed by a few roundings), and half a unit of the output's dtype."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * (2 if dtype is torch.float32 else info.eps)  # exp gives 0 below the normal numbers
    bound = 4 * EPS * error + 0.5001 * info.eps * wanted.abs() + smallest
    excess = (got.double() - wanted).abs() - bound
    assert got.shape == wanted.shape and got.dtype is dtype
    assert not excess.numel() or (excess <= 0).all(), f"{excess.max().item():.3e} beyond the bound"
