"""Layer and RMS normalization on lazy tensors."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.errors import ShapeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.operands import fp32, plain, row_sum, write
from fusible.tex.backends.xla.quantize import emit
from fusible.tex.calls.checks import check_norm_backward, check_norm_parameter, check_norm_statistic
from fusible.tex.formats import is_quantized
from fusible.tex.interface.normalization import Normalization
from fusible.tex.interface.prim import Prim
from fusible.tex.protocol import check_shape, outer

__all__ = ["NormalizationKernels"]


class NormalizationKernels(Normalization, Prim):
    def layernorm_fwd(
        self,
        input: Any,
        weight: Any,
        bias: Any,
        eps: float,
        ln_out: Any,
        quantizer: Any,
        otype: Any,
        sm_margin: int,
        zero_centered_gamma: bool,
    ) -> list[Any]:
        x, gamma = plain(input), plain(weight)
        check_norm_parameter(gamma, x, "weight of layernorm_fwd")
        rows = fp32(x)
        mu = _mean(rows)
        centered = rows - mu
        rsigma = lazy.rsqrt(_mean(centered * centered) + eps)
        y = centered * rsigma * _scale(gamma, zero_centered_gamma)
        if bias is not None:
            check_norm_parameter(bias, x, "bias of layernorm_fwd")
            y = y + fp32(bias)
        return [_emit(y, quantizer, to_lazy(otype), ln_out), _statistic(mu), _statistic(rsigma)]

    def layernorm_bwd(self, dz: Any, x: Any, mu: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool) -> list[Any]:
        x = plain(x)
        dx, *rest = _layernorm_backward(plain(dz), x, mu, rsigma, plain(gamma), zero_centered_gamma, "layernorm_bwd")
        return [lazy.cast(dx, x.dtype), *rest]

    def prim_layernorm_bwd_add(
        self, dz: Any, x: Any, add: Any, mu: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool
    ) -> list[Any]:
        function, x, add = "prim.layernorm_bwd_add", plain(x), plain(add)
        check_shape(add, x.shape, f"add of {function}")
        dx, *rest = _layernorm_backward(plain(dz), x, mu, rsigma, plain(gamma), zero_centered_gamma, function)
        return [lazy.cast(dx + fp32(add), x.dtype), *rest]

    def rmsnorm_fwd(
        self, input: Any, weight: Any, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int, zero_centered_gamma: bool
    ) -> list[Any]:
        x, gamma = plain(input), plain(weight)
        check_norm_parameter(gamma, x, "weight of rmsnorm_fwd")
        rows = fp32(x)
        rsigma = lazy.rsqrt(_mean(rows * rows) + eps)
        y = rows * rsigma * _scale(gamma, zero_centered_gamma)
        return [_emit(y, quantizer, to_lazy(otype), ln_out), None, _statistic(rsigma)]

    def rmsnorm_bwd(self, dz: Any, x: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool) -> list[Any]:
        x = plain(x)
        dx, dgamma = _rmsnorm_backward(plain(dz), x, rsigma, plain(gamma), zero_centered_gamma, "rmsnorm_bwd")
        return [lazy.cast(dx, x.dtype), dgamma]

    def rmsnorm_bwd_add(self, dz: Any, x: Any, add: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool) -> list[Any]:
        x, add = plain(x), plain(add)
        check_shape(add, x.shape, "add of rmsnorm_bwd_add")
        dx, dgamma = _rmsnorm_backward(plain(dz), x, rsigma, plain(gamma), zero_centered_gamma, "rmsnorm_bwd_add")
        return [lazy.cast(dx + fp32(add), x.dtype), dgamma]


def _layernorm_backward(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, zero_centered: bool, function: str
) -> tuple[Tensor, Tensor, Tensor]:
    """``dx`` in fp32, ``dgamma`` and ``dbeta`` in gamma's dtype."""
    check_norm_backward(dz, x, rsigma, gamma, function)
    check_norm_statistic(mu, x, f"mu of {function}")
    rs = _per_row(rsigma, x)
    xh, g = (fp32(x) - _per_row(mu, x)) * rs, fp32(dz)
    dy = g * _scale(gamma, zero_centered)
    dx = (dy - _mean(dy) - xh * _mean(dy * xh)) * rs
    return dx, lazy.cast(row_sum(g * xh), gamma.dtype), lazy.cast(row_sum(g), gamma.dtype)


def _rmsnorm_backward(dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, zero_centered: bool, function: str) -> tuple[Tensor, Tensor]:
    """``dx`` in fp32, and ``dgamma`` in gamma's dtype."""
    check_norm_backward(dz, x, rsigma, gamma, function)
    rs = _per_row(rsigma, x)
    xh, g = fp32(x) * rs, fp32(dz)
    dy = g * _scale(gamma, zero_centered)
    dx = (dy - xh * _mean(dy * xh)) * rs
    return dx, lazy.cast(row_sum(xh * g), gamma.dtype)


def _mean(x: Tensor) -> Tensor:
    return lazy.mean(x, -1, keepdim=True)


def _scale(gamma: Tensor, zero_centered: bool) -> Tensor:
    gamma = fp32(gamma)
    return gamma + 1.0 if zero_centered else gamma


def _statistic(x: Tensor) -> Tensor:
    return lazy.reshape(x, (outer(x.shape),))


def _per_row(statistic: Tensor, x: Tensor) -> Tensor:
    return lazy.reshape(statistic, (*x.shape[:-1], 1))


def _emit(y: Tensor, quantizer: Any, dtype: lazy.dtype, out: Any) -> Any:
    if quantizer is None:
        return write(y, dtype, out)
    if out is not None and not is_quantized(out):
        raise ShapeError(expected("a quantized tensor", of="ln_out with a quantizer", got=type(out).__qualname__, do="pass None"))
    return emit(y, quantizer, dtype, out)
