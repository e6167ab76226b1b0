"""Activations on lazy tensors: what surrounds any of the functions of ``pointwise``, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.operands import fp32, plain, row_sum
from fusible.tex.backends.xla.pointwise import GATES, POINTWISE
from fusible.tex.backends.xla.quantize import emit
from fusible.tex.calls.activation import ScaledActivations
from fusible.tex.calls.checks import check_gradient, check_row_scales, check_width_even, check_width_of_blocks

__all__ = ["ActivationKernels"]


def _finish(result: Tensor, quantizer: Any, dtype: lazy.dtype) -> Any:
    return lazy.cast(result, dtype) if quantizer is None else emit(result, quantizer, dtype)


def _halves(x: Tensor, function: str, interleave: int = 0) -> tuple[Tensor, Tensor]:
    """The operands of a gate in fp32; with ``interleave`` k they alternate in blocks of k."""
    check_width_even(x, function)
    check_width_of_blocks(x, interleave, function)
    half = (*x.shape[:-1], x.shape[-1] // 2)
    if not interleave:
        a, b = lazy.split(fp32(x), [half[-1], half[-1]], -1)
        return a, b
    a, b = lazy.split(fp32(lazy.reshape(x, (*x.shape[:-1], half[-1] // interleave, 2 * interleave))), [interleave, interleave], -1)
    return lazy.reshape(a, half), lazy.reshape(b, half)


def _side_by_side(da: Tensor, db: Tensor, interleave: int = 0) -> Tensor:
    """The inverse of ``_halves``."""
    if not interleave:
        return lazy.concatenate([da, db], -1)
    lead, half = da.shape[:-1], da.shape[-1]
    blocks = [lazy.reshape(d, (*lead, half // interleave, interleave)) for d in (da, db)]
    return lazy.reshape(lazy.concatenate(blocks, -1), (*lead, 2 * half))


def _forward(name: str) -> Callable[..., Any]:
    f, _ = POINTWISE[name]

    def forward(self: Any, input: Any, quantizer: Any) -> Any:
        x = plain(input)
        return _finish(f(fp32(x)), quantizer, x.dtype)

    return forward


def _backward(name: str) -> Callable[..., Any]:
    _, gradient = POINTWISE[name]

    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: Any) -> Any:
        g, x = plain(grad), plain(fwd_input)
        check_gradient(g, x.shape, f"d{name}")
        return _finish(gradient(fp32(g), fp32(x)), quantizer, x.dtype)

    return backward


def _backward_with_bias(name: str) -> Callable[..., Any]:
    _, gradient = POINTWISE[name]

    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: Any) -> list[Any]:
        g, x = plain(grad), plain(fwd_input)
        check_gradient(g, x.shape, f"dbias_d{name}")
        dx = gradient(fp32(g), fp32(x))
        return [lazy.cast(row_sum(dx), g.dtype), _finish(dx, quantizer, g.dtype)]

    return backward


def _row_scales(act_scales: Any, x: Tensor, function: str) -> Tensor:
    """``act_scales`` as an fp32 factor of each row of ``x``."""
    check_row_scales(act_scales, x, function)
    return lazy.reshape(fp32(act_scales), (*x.shape[:-1], 1))


def _scales_gradient(g: Tensor, activated: Tensor, act_scales: Tensor) -> Tensor:
    return lazy.cast(lazy.reshape(lazy.sum(activated * g, -1), act_scales.shape), act_scales.dtype)


class ActivationKernels(ScaledActivations):
    gelu, dgelu, dbias_dgelu = _forward("gelu"), _backward("gelu"), _backward_with_bias("gelu")
    silu, dsilu, dbias_dsilu = _forward("silu"), _backward("silu"), _backward_with_bias("silu")
    relu, drelu, dbias_drelu = _forward("relu"), _backward("relu"), _backward_with_bias("relu")
    qgelu, dqgelu, dbias_dqgelu = _forward("qgelu"), _backward("qgelu"), _backward_with_bias("qgelu")
    srelu, dsrelu, dbias_dsrelu = _forward("srelu"), _backward("srelu"), _backward_with_bias("srelu")

    def gate(self, name: str, input: Any, quantizer: Any, *options: float) -> Any:
        x = plain(input)
        return _finish(GATES[name][0](*_halves(x, name), *options), quantizer, x.dtype)

    def gate_gradient(self, name: str, function: str, grad: Any, fwd_input: Any, quantizer: Any, *options: float) -> Any:
        g, x = plain(grad), plain(fwd_input)
        a, b = _halves(x, function)
        check_gradient(g, a.shape, function)
        return _finish(_side_by_side(*GATES[name][1](fp32(g), a, b, *options)), quantizer, x.dtype)

    def scaled_gate(self, name: str, input: Any, act_scales: Any, quantizer: Any, interleave: int, *options: float) -> Any:
        x, function = plain(input), f"scaled_{name}"
        scales = _row_scales(act_scales, x, function)
        return _finish(GATES[name][0](*_halves(x, function, interleave), *options) * scales, quantizer, x.dtype)

    def scaled_gate_gradient(
        self, name: str, function: str, grad: Any, fwd_input: Any, act_scales: Any, quantizer: Any, interleave: int, compute: bool, *options: float
    ) -> tuple[Any, Tensor | None]:
        g, x = plain(grad), plain(fwd_input)
        scales, (a, b) = _row_scales(act_scales, x, function), _halves(x, function, interleave)
        check_gradient(g, a.shape, function)
        (f, gradient), g = GATES[name], fp32(g)
        for_scales = _scales_gradient(g, f(a, b, *options), act_scales) if compute else None
        return _finish(_side_by_side(*gradient(g * scales, a, b, *options), interleave), quantizer, x.dtype), for_scales

    def scaled_srelu(self, input: Any, act_scales: Any, quantizer: Any) -> Any:
        x = plain(input)
        scales = _row_scales(act_scales, x, "scaled_srelu")
        return _finish(POINTWISE["srelu"][0](fp32(x)) * scales, quantizer, x.dtype)

    def scaled_dsrelu(self, grad: Any, fwd_input: Any, act_scales: Any, quantizer: Any, compute_scale_grad: bool = True) -> Any:
        g, x = plain(grad), plain(fwd_input)
        check_gradient(g, x.shape, "scaled_dsrelu")
        scales, (f, gradient), point, g = _row_scales(act_scales, x, "scaled_dsrelu"), POINTWISE["srelu"], fp32(x), fp32(g)
        for_scales = _scales_gradient(g, f(point), act_scales) if compute_scale_grad else None
        return _finish(gradient(g * scales, point), quantizer, x.dtype), for_scales
