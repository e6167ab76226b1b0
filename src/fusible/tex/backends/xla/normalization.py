"""The norms on lazy tensors: formulas, or the native kernels where these are faster."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla import native
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.backends.xla.native import Result
from fusible.tex.backends.xla.quantizing import produce
from fusible.tex.calls.normalization import NormGradient, NormOutput
from fusible.tex.formulas.normalization import NormalizationFormulas
from fusible.tex.protocol import outer

__all__ = ["NormalizationKernels"]


class NormalizationKernels(LazyKernels, NormalizationFormulas):
    def layernorm(self, x: Tensor, gamma: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, output: NormOutput) -> list[Any]:
        if output.out is not None or not native.serves(x, gamma, *(() if bias is None else (bias,))):
            return super().layernorm(x, gamma, bias, eps, zero_centered, output)
        y, written = _written(x, gamma, bias, eps, zero_centered, output, mu=_statistic(x))
        return [y, written["mu"], written["rsigma"]]

    def rmsnorm(self, x: Tensor, gamma: Tensor, eps: float, zero_centered: bool, output: NormOutput) -> list[Any]:
        if output.out is not None or not native.serves(x, gamma):
            return super().rmsnorm(x, gamma, eps, zero_centered, output)
        y, written = _written(x, gamma, None, eps, zero_centered, output)
        return [y, None, written["rsigma"]]

    def layernorm_gradient(self, of: NormGradient) -> list[Any]:
        return _gradients(of, "dx", "dgamma", "dbeta") if _differentiates(of) else super().layernorm_gradient(of)

    def rmsnorm_gradient(self, of: NormGradient) -> list[Any]:
        return _gradients(of, "dx", "dgamma") if _differentiates(of) else super().rmsnorm_gradient(of)


def _statistic(x: Tensor) -> Result:
    return Result((outer(x.shape),), lazy.float32)


def _written(
    x: Tensor, gamma: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, output: NormOutput, **more: Result
) -> tuple[Any, dict[str, Tensor]]:
    arguments = {"x": x, "weight": gamma, "bias": bias, "rsigma": _statistic(x), "eps": float(eps), "zero_centered_gamma": zero_centered, **more}
    return produce("norm_fwd", arguments, x.shape, to_lazy(output.dtype), output.quantizer)


def _differentiates(of: NormGradient) -> bool:
    return native.serves(*(x for x in (of.x, of.dz, of.gamma, of.add) if x is not None))


def _gradients(of: NormGradient, *names: str) -> list[Any]:
    results = dict(zip(names, (Result(x.shape, x.dtype) for x in (of.x, of.gamma, of.gamma)), strict=False))
    statistics = {"mu": of.mu, "rsigma": of.rsigma}
    arguments = {"dz": of.dz, "x": of.x, **statistics, "weight": of.gamma, "zero_centered_gamma": of.zero_centered, "add": of.add}
    written = native.call("norm_bwd", {**arguments, **results})
    return [written[name] for name in names]
