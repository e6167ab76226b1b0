"""How far quantization may move a result: error bounds in float64 that follow from the number formats, carried through products.

An ``Uncertain`` value is a float64 tensor with, for each element, the largest error that it can have (``worst``) and the variance of that error when
roundings fall anywhere within a step (``variance``: of a rounding to nearest ``half_step^2 / 3``, as a uniform error has). A result is checked twice:
no element errs by more than its worst case, which bounds every single rounding; and the Frobenius norm of all errors is what the sum of the variances
makes it, with the factor ``SPREAD``, which is the sharper one, as errors of the terms of a sum are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusible.conformance.block_oracle import transformed
from fusible.quantized import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

__all__ = ["RECIPES", "RMS", "SPREAD", "Uncertain", "check", "linear", "linear_dweight", "linear_dx"]

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "block": Float8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
RMS = {"E4M3": 0.204 * 2.0**-3, "E5M2": 0.204 * 2.0**-2, "E2M1": 0.11}
"""The relative error of a quantized tensor, root mean square. Of an FP8 rounding ``eps / sqrt(12)`` of the power of two below a value, on average
``sqrt(1/2)`` of it. Of E2M1 whose blocks fill [-6, 6]: steps of 1/2, 1 and 2 on [0, 2], [2, 4] and [4, 6] make ``sqrt(mean(step^2) / 12) = 0.38`` of
values with the root mean square ``6 / sqrt(3)``."""
SPREAD = 1.5
"""Of the norm of hundreds of errors around its expectation, and of the expectation itself: half steps are taken as if they all were those of the
lower end of a binade."""
_FP32 = torch.finfo(torch.float32).eps
_HALF_STEP = {"E4M3": 2.0**-4, "E5M2": 2.0**-3}
"""Relative, at a power of two: ``2^-(mantissa bits + 1)``."""
_SMALLEST = {"E4M3": 2.0**-10, "E5M2": 2.0**-17}
"""Half the distance of subnormal numbers."""
_LARGEST = {"E4M3": 448.0, "E5M2": 57344.0}


@dataclass(frozen=True)
class Uncertain:
    """A value with the errors that it may have; see the module."""

    value: Tensor
    worst: Tensor
    variance: Tensor

    @classmethod
    def exact(cls, value: Tensor) -> Uncertain:
        value = value.detach().double()
        return cls(value, torch.zeros_like(value), torch.zeros_like(value))

    def off_by(self, step: Tensor) -> Uncertain:
        """After a rounding by at most ``step``."""
        return Uncertain(self.value, self.worst + step, self.variance + step**2 / 3)

    def rounded(self, dtype: torch.dtype) -> Uncertain:
        info = torch.finfo(dtype)
        return self.off_by(0.5 * info.eps * (self.value.abs() + self.worst) + info.smallest_normal * info.eps)

    def plus(self, other: Uncertain) -> Uncertain:
        return Uncertain(self.value + other.value, self.worst + other.worst, self.variance + other.variance)

    def through(self, jacobian: Tensor) -> Uncertain:
        """Of each row r the product ``jacobian[r] @ value[r]``: linear, so that errors pass by the same coefficients."""
        apply = lambda matrix, values: torch.einsum("roi,ri->ro", matrix, values)  # noqa: E731
        return Uncertain(apply(jacobian, self.value), apply(jacobian.abs(), self.worst), apply(jacobian**2, self.variance))

    def reshape(self, *shape: int) -> Uncertain:
        return Uncertain(*(tensor.reshape(*shape) for tensor in (self.value, self.worst, self.variance)))


def check(what: str, got: Tensor, wanted: Uncertain) -> None:
    """``got`` is within both bounds."""
    assert got.shape == wanted.value.shape, f"{what}: shape {list(got.shape)} instead of {list(wanted.value.shape)}"
    error = (got.double() - wanted.value).abs()
    assert (error <= wanted.worst).all(), f"{what}: {(error / wanted.worst).max().item():.3g} of the largest error that an element can have"
    allowed = SPREAD * wanted.variance.sum().sqrt()
    assert error.norm() <= allowed, f"{what}: {(error.norm() / allowed).item():.3g} of the norm that errors can have"


def linear(x: Uncertain, weight: Uncertain, recipe: Recipe | None, dtype: torch.dtype) -> Uncertain:
    """``x @ weight.T`` as the recipe's product computes it, rounded to ``dtype``."""
    return _product(_quantized(x, recipe, "input", dtype), _quantized(weight, recipe, "weight", dtype)).rounded(dtype)


def linear_dx(dy: Uncertain, weight: Uncertain, recipe: Recipe | None, dtype: torch.dtype) -> Uncertain:
    """``dy @ weight``."""
    return _product(_quantized(dy, recipe, "grad_output", dtype), _transposed(_quantized(weight, recipe, "weight", dtype))).rounded(dtype)


def linear_dweight(dy: Uncertain, x: Uncertain, recipe: Recipe | None, dtype: torch.dtype, held: torch.dtype) -> Uncertain:
    """``dy.T @ x``, in the dtype that the weight is ``held`` in. NVFP4 multiplies both by a Hadamard matrix along the tokens first; the product stays
    the same, and the roundings are those of the transformed values."""
    operands = []
    for operand, role in ((dy, "grad_output"), (x, "input")):
        turned = _by_hadamard(operand) if isinstance(recipe, NVFP4BlockScaling) else _transposed(operand)
        operands.append(_quantized(turned, recipe, role, dtype))
    return _product(*operands).rounded(held)


def _product(a: Uncertain, b: Uncertain) -> Uncertain:
    """``a @ b.T``, summed in fp32: each addition errs by at most ``eps(fp32)`` of the sum so far."""
    size, other = a.value.abs(), b.value.abs()
    sums = (a.value.shape[-1] + 16) * _FP32 * (size @ other.T)
    worst = size @ b.worst.T + a.worst @ other.T + a.worst @ b.worst.T
    variance = size**2 @ b.variance.T + a.variance @ other.T**2 + a.variance @ b.variance.T
    return Uncertain(a.value @ b.value.T, worst, variance).off_by(sums)


def _transposed(x: Uncertain) -> Uncertain:
    return Uncertain(x.value.T, x.worst.T, x.variance.T)


def _by_hadamard(x: Uncertain) -> Uncertain:
    """``x.T`` with every 16 columns multiplied by an orthogonal matrix of entries +-1/4, rounded to bf16, as the oracle's values are themselves."""
    value = torch.from_numpy(transformed(x.value.float().numpy())).double()
    columns, tokens = value.shape

    def spread(errors: Tensor, factor: float) -> Tensor:
        return (errors.T.reshape(columns, -1, 16).sum(-1, keepdim=True) * factor).expand(-1, -1, 16).reshape(columns, tokens)

    turned = Uncertain(value, spread(x.worst, 0.25), spread(x.variance, 1 / 16))
    return turned.rounded(torch.bfloat16).rounded(torch.bfloat16)


def _quantized(x: Uncertain, recipe: Recipe | None, role: str, dtype: torch.dtype) -> Uncertain:
    """An operand of a product: along its last dimension it is multiplied."""
    if recipe is None:
        return x.rounded(dtype) if role == "weight" else x  # whatever else comes has the dtype
    if isinstance(recipe, NVFP4BlockScaling):
        return _e2m1(x, tiled=role == "weight", stochastic=role == "grad_output")
    fp8_format = recipe.fp8_format  # type: ignore[attr-defined]
    name = "E5M2" if fp8_format is Format.HYBRID and role == "grad_output" else "E4M3"
    size = x.value.abs() + x.worst
    # A scale maps the largest value to the largest number, or to half of it where scales are powers of two; a block's is larger than the tensor's.
    subnormal = 2 * _SMALLEST[name] / _LARGEST[name] * (size.max() if size.numel() else 0.0)
    return x.off_by(_HALF_STEP[name] * size + subnormal)


def _e2m1(x: Uncertain, *, tiled: bool, stochastic: bool) -> Uncertain:
    """Of a block (16 elements, or 16x16) the unit is a sixth of the amax, rounded to E4M3: by at most ``2^-4`` of itself. Steps are 1/2 unit below 2
    units, 1 below 4, and 2 above; rounding stochastically errs by up to a whole step, with a variance of at most a quarter of its square."""
    size = x.value.abs() + x.worst
    rows, columns = size.shape
    blocks = size.reshape(rows // 16, 16, columns // 16, 16) if tiled else size.reshape(rows, 1, columns // 16, 16)
    amax = blocks.amax((1, 3), keepdim=True)
    low, high = amax / 6 * (1 - 2.0**-4), amax / 6 * (1 + 2.0**-4)
    units = blocks / low.clamp(min=torch.finfo(torch.float32).tiny)
    step = (high * torch.where(units <= 2, 0.5, torch.where(units <= 4, 1.0, 2.0))).reshape(rows, columns)
    if stochastic:
        return Uncertain(x.value, x.worst + step, x.variance + step**2 / 4)
    return x.off_by(step / 2)
