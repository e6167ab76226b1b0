"""Rounding as noise (Parker 1997, Monte Carlo Arithmetic): how far a result may be from float64, found by computing it in float64 many times over
with noise of the size of each rounding.

A reference is a formula on float64 tensors that says where a kernel rounds: ``Noise.terms`` for what is computed in fp32, ``Noise.stored`` for what
is written in the dtype of the activations, ``Noise.operand`` for an operand of a product in 8 bits. Without noise it is the formula itself. With
noise, and with autograd, the spread of each element of each result and each gradient is what those roundings can do to it: conditions, cancellation
and the lengths of sums are counted by the formula, not by hand.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from quantization_error import _HALF_STEP, _LARGEST, _SMALLEST
from torch import Tensor

from fusible.quantized import DelayedScaling, Format, NVFP4BlockScaling, Recipe

__all__ = ["Noise", "spread"]

FP32 = 2.0**-24
"""Half a unit in the last place, relative."""


class _Passed(torch.autograd.Function):
    """``there(x)``, whose gradient is ``back(dy)``: neither is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.back(dy), None, None


class _Product(torch.autograd.Function):
    """``x @ weight.T``, each operand of each of the three products rounded by itself."""

    @staticmethod
    def forward(ctx: Any, noise: Noise, x: Tensor, weight: Tensor) -> Tensor:
        ctx.noise = noise
        ctx.save_for_backward(x, weight)
        return noise.operand(x, "input") @ noise.operand(weight, "weight").T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        noise: Noise = ctx.noise
        x, weight = ctx.saved_tensors
        dx = noise.operand(dy, "grad_output") @ noise.operand(weight.T, "weight").T
        return None, dx, noise.across(dy, "grad_output") @ noise.across(x, "input").T


class _Attended(torch.autograd.Function):
    """``softmax(scores [heads, queries, keys]) @ v [keys, heads, width]``. Backward takes the mean of the probabilities' gradients from the output,
    as it was stored (Dao et al. 2022, arXiv:2205.14135): of one key the difference of two equal numbers is what rounding makes it."""

    @staticmethod
    def forward(ctx: Any, noise: Noise, scores: Tensor, v: Tensor) -> Tensor:
        p = scores.softmax(-1)
        ctx.noise = noise
        ctx.save_for_backward(p, v)
        return torch.einsum("hqk,khd->qhd", noise.rounded(noise.term(p, v.shape[0])), noise.term(v, v.shape[0]))

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        noise: Noise = ctx.noise
        p, v = ctx.saved_tensors
        o = torch.einsum("hqk,khd->qhd", p, v)
        dp = torch.einsum("qhd,khd->hqk", noise.term(do, v.shape[-1]), noise.term(v, v.shape[-1]))
        mean = (noise.term(do, v.shape[-1]) * noise.rounded(o)).sum(-1).T[..., None]
        dv = torch.einsum("hqk,qhd->khd", noise.rounded(p), noise.term(do, len(do)))
        return None, noise.rounded(noise.term(p) * (dp - mean)), dv


class Noise:
    """``seed``: None for none. ``dtype``: what activations are stored in; ``recipe``: what rounds the operands of products."""

    def __init__(self, seed: int | None, dtype: torch.dtype, recipe: Recipe | None = None) -> None:
        self.on, self._place = seed is not None, (seed or 0) << 20
        self.dtype, self.recipe = dtype, recipe

    def unquantized(self) -> Noise:
        """Of what no recipe quantizes; its draws are others."""
        other = copy.copy(self)
        other.recipe, other._place = None, self._place + (1 << 19)
        return other

    def _uniform(self, x: Tensor) -> Tensor:
        """In [-1, 1), as a hash of each value and of how many came before: equal values, as those of equal rows, are rounded alike; 0 is exact."""
        self._place += 1
        bits = x.detach().clone(memory_format=torch.contiguous_format).view(torch.int64)
        for factor in (-7046029254386353131, -4417276706812531889):
            bits = (bits ^ (bits >> 29) ^ (self._place * 2654435761)) * factor
        return ((bits >> 10).double() * 2.0**-53).masked_fill(x == 0, 0.0)

    def _both_ways(self, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        return x if not self.on else _Passed.apply(x, rounded, rounded)

    def _relative(self, x: Tensor, size: float) -> Tensor:
        return x * (1 + size * self._uniform(x)) if self.on else x

    def _to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.on:
            return x
        info = torch.finfo(dtype)
        return self._relative(x, info.eps / 2) + self._uniform(x) * info.smallest_normal * info.eps / 2

    def term(self, x: Tensor, length: int = 1) -> Tensor:
        """Of ``terms``, forward or backward alone."""
        return self._relative(x, FP32 * (2 + math.sqrt(length)))

    def rounded(self, x: Tensor) -> Tensor:
        """Of ``stored``, forward or backward alone."""
        return self._to(x, self.dtype)

    def terms(self, x: Tensor, length: int = 1) -> Tensor:
        """Values computed in fp32, or added up, ``length`` of them: an error of partial sums grows as a random walk does, and is counted with the
        term that came last."""
        return self._both_ways(x, lambda value: self.term(value, length))

    def stored(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Values that are written in the activations' dtype, or in another, and so are their gradients."""
        return self._both_ways(x, lambda value: self._to(value, dtype or self.dtype))

    def leaf(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """An input, which is as it is; its gradient is written in its dtype."""
        return x if not self.on else _Passed.apply(x, lambda value: value * 1, lambda dx: self._to(dx, dtype))

    def cast(self, x: Tensor) -> Tensor:
        """A parameter that is cast to the activations' dtype before it is used."""
        return x if not self.on else _Passed.apply(x, lambda value: self._to(value, self.dtype), lambda dx: dx)

    def tanh(self, x: Tensor) -> Tensor:
        """In fp32, whose errors are parts of 1: near 1 they are all that is left of ``1 - tanh^2``."""
        noise, exact = (2 * FP32 * self._uniform(x) for _ in range(2)) if self.on else (0.0, 0.0)
        value = torch.tanh(x.detach())
        return _Passed.apply(x, lambda _: value + noise, lambda dy: dy * (1 - (value + exact) ** 2))

    def sigmoid(self, x: Tensor) -> Tensor:
        """In fp32; ``1 - sigmoid`` is rounded as a part of 1."""
        value, noise = torch.sigmoid(x.detach()), 2 * FP32 * self._uniform(x) if self.on else 0.0
        return _Passed.apply(x, lambda _: self._relative(value, 2 * FP32), lambda dy: dy * value * (1 - value + noise))

    @staticmethod
    def passed(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        """``there(x)``, with the gradient ``back(dy)``."""
        return _Passed.apply(x, there, back)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x [rows, in] @ weight [out, in].T``."""
        return _Product.apply(self, x, weight)

    def attended(self, scores: Tensor, v: Tensor) -> Tensor:
        """``softmax(scores [heads, queries, keys]) @ v [keys, heads, width]``: ``[queries, heads, width]``."""
        return _Attended.apply(self, scores, v)

    def operand(self, x: Tensor, role: str) -> Tensor:
        """An operand of a product, along its last dimension multiplied."""
        if not self.on:
            return x
        x = self.term(x, x.shape[-1])
        if self.recipe is None or not x.numel():
            return self._to(x, self.dtype) if role == "weight" else x
        if isinstance(self.recipe, NVFP4BlockScaling):
            return x + self._e2m1(x, tiled=role == "weight", stochastic=role == "grad_output")
        name = "E5M2" if self.recipe.fp8_format is Format.HYBRID and role == "grad_output" else "E4M3"  # type: ignore[attr-defined]
        # A block's scale is finer than the tensor's; powers of two leave up to half of the range empty. Delayed scaling begins with a scale of 1.
        unit = 2 * x.abs().amax() / _LARGEST[name]
        subnormal = _SMALLEST[name] * (unit.clamp(min=1) if isinstance(self.recipe, DelayedScaling) else unit)
        return x + self._uniform(x) * (_HALF_STEP[name] * x.abs() + subnormal)

    def across(self, x: Tensor, role: str) -> Tensor:
        """An operand of the product of a weight's gradient: ``[rows, columns]``, along its rows multiplied. NVFP4 turns both by a Hadamard matrix."""
        if not self.on or not isinstance(self.recipe, NVFP4BlockScaling) or not x.numel():
            return self.operand(x.T, role)
        hadamard = torch.ones(1, 1, dtype=torch.float64)
        for _ in range(4):
            hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]) / math.sqrt(2)
        turned = (x.T.reshape(x.shape[1], -1, 16) @ hadamard).reshape(x.shape[1], -1)
        return (self.operand(turned, role).reshape(x.shape[1], -1, 16) @ hadamard.T).reshape(x.shape[1], -1)

    def _e2m1(self, x: Tensor, *, tiled: bool, stochastic: bool) -> Tensor:
        """Of blocks of 16 elements, or 16x16: half a step of a grid whose unit is a sixth of the largest, or a whole one."""
        rows, columns = x.shape
        blocks = x.abs().reshape(rows // 16, 16, -1, 16) if tiled else x.abs().reshape(rows, 1, -1, 16)
        unit = blocks.amax((1, 3), keepdim=True) / 6 * (1 + 2.0**-4)
        units = blocks / unit.clamp(min=torch.finfo(torch.float32).tiny)
        step = (unit * torch.where(units <= 2, 0.5, torch.where(units <= 4, 1.0, 2.0))).reshape(rows, columns)
        return self._uniform(x) * step * (1.0 if stochastic else 0.5)


def spread(compute: Callable[[Noise], Sequence[Tensor]], dtype: torch.dtype, recipe: Recipe | None, samples: int) -> list[tuple[Tensor, Tensor]]:
    """Each result of ``compute`` without noise, and the root mean square of what noise does to each of its elements."""
    wanted = compute(Noise(None, dtype, recipe))
    squares = [torch.zeros_like(value) for value in wanted]
    for seed in range(samples):
        for total, value, found in zip(squares, wanted, compute(Noise(seed, dtype, recipe)), strict=True):
            total += (found - value) ** 2
    return [(value, (total / samples).sqrt()) for value, total in zip(wanted, squares, strict=True)]
