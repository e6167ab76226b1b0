"""Layer and RMS normalization, wide, rounded once."""

from __future__ import annotations

from typing import Any

from fusible.errors import DTypeError, expected
from fusible.tex.calls.normalization import NormalizationBySteps, NormGradient, NormOutput
from fusible.tex.formats import is_quantized
from fusible.tex.formulas.arrays import Array, ArrayKernels
from fusible.tex.interface.arguments import Tensor
from fusible.tex.protocol import outer

__all__ = ["NormalizationFormulas"]


class NormalizationFormulas(ArrayKernels, NormalizationBySteps):
    def norm_operand(self, x: Tensor) -> Any:
        return self._plain(x)

    def layernorm(self, x: Array, gamma: Array, bias: Array | None, eps: float, zero_centered: bool, output: NormOutput) -> list[Any]:
        xp = self._arrays
        rows = xp.wide(x)
        mu = xp.mean(rows)
        centered = rows - mu
        rsigma = xp.rsqrt(xp.mean(centered * centered) + eps)
        y = xp.times(centered * rsigma, self._norm_gain(gamma, x, zero_centered))
        y = y if bias is None else xp.plus(y, xp.wide(bias))
        return [self._norm_result(y, output), _by_rows(xp, mu), _by_rows(xp, rsigma)]

    def rmsnorm(self, x: Array, gamma: Array, eps: float, zero_centered: bool, output: NormOutput) -> list[Any]:
        xp = self._arrays
        rows = xp.wide(x)
        rsigma = xp.rsqrt(xp.plus(xp.mean(rows * rows), eps))
        y = xp.times(rows * rsigma, self._norm_gain(gamma, x, zero_centered))
        return [self._norm_result(y, output), None, _by_rows(xp, rsigma)]

    def layernorm_gradient(self, of: NormGradient) -> list[Any]:
        xp = self._arrays
        rs = self._norm_statistic(of.rsigma, of.x)
        xh, g = (xp.wide(of.x) - self._norm_statistic(of.mu, of.x)) * rs, xp.wide(of.dz)
        dy = g * self._norm_gain(of.gamma, of.x, of.zero_centered)
        dx = (dy - xp.mean(dy) - xh * xp.mean(dy * xh)) * rs
        return [self._norm_gradient(dx, of), *(xp.cast(self._row_sum(x), of.gamma.dtype) for x in (g * xh, g))]

    def rmsnorm_gradient(self, of: NormGradient) -> list[Any]:
        xp = self._arrays
        rs = self._norm_statistic(of.rsigma, of.x)
        xh, g = xp.wide(of.x) * rs, xp.wide(of.dz)
        dy = g * self._norm_gain(of.gamma, of.x, of.zero_centered)
        dx = (dy - xh * xp.mean(dy * xh)) * rs
        return [self._norm_gradient(dx, of), xp.cast(self._row_sum(xh * g), of.gamma.dtype)]

    def _norm_gain(self, gamma: Array, x: Array, zero_centered: bool) -> Any:
        gamma = self._arrays.wide(gamma)
        return gamma + 1.0 if zero_centered else gamma

    def _norm_statistic(self, statistic: Array, x: Array) -> Any:
        return self._arrays.reshape(statistic, (*x.shape[:-1], 1))

    def _norm_gradient(self, dx: Array, of: NormGradient) -> Any:
        return self._arrays.cast(dx if of.add is None else self._arrays.plus(dx, self._arrays.wide(of.add)), of.x.dtype)

    def _norm_result(self, y: Array, output: NormOutput) -> Any:
        dtype, out = self._arrays.dtype(output.dtype), output.out
        if output.quantizer is None:
            return self._write(y, dtype, out)
        if out is not None and not is_quantized(out):
            raise DTypeError(expected("a quantized tensor", of="ln_out with a quantizer", got=type(out).__qualname__, do="pass None"))
        return self._emit(y, output.quantizer, dtype, out)


def _by_rows(xp: Any, statistic: Array) -> Any:
    return xp.reshape(statistic, (outer(statistic.shape),))
