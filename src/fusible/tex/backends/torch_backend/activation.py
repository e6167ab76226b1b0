"""Activations: what surrounds any of the functions of ``pointwise``, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.operands import flat, plain, wide
from fusible.tex.backends.torch_backend.pointwise import GATES, POINTWISE, Pointwise
from fusible.tex.backends.torch_backend.quantize import emit
from fusible.tex.calls.activation import ScaledActivations
from fusible.tex.calls.checks import check_gradient, check_row_scales, check_width_even, check_width_of_blocks

__all__ = ["ActivationKernels", "POINTWISE", "Pointwise", "scaled_gate"]


def _finish(result: Tensor, quantizer: Any, dtype: torch.dtype) -> Any:
    if quantizer is not None:
        return emit(result, quantizer, dtype)
    return result if result.dtype is dtype else result.to(dtype)


def _halves(x: Tensor, function: str, interleave: int = 0) -> tuple[Tensor, Tensor]:
    """The operands of a gate, wide; with ``interleave`` k they alternate in blocks of k."""
    check_width_even(x, function)
    check_width_of_blocks(x, interleave, function)
    width = x.shape[-1]
    if interleave:
        blocks = x.unflatten(-1, (width // (2 * interleave), 2, interleave))
        return wide(blocks[..., 0, :].flatten(-2)), wide(blocks[..., 1, :].flatten(-2))
    a, b = x.split(width // 2, -1) if width else (x, x)
    return wide(a), wide(b)


def _side_by_side(da: Tensor, db: Tensor, interleave: int = 0) -> Tensor:
    """The inverse of ``_halves``."""
    if not interleave:
        return torch.cat((da, db), -1)
    blocks = da.shape[-1] // interleave
    return torch.stack((da.unflatten(-1, (blocks, interleave)), db.unflatten(-1, (blocks, interleave))), -2).flatten(-3)


def _forward(name: str) -> Callable[..., Any]:
    entry = POINTWISE[name]
    f, one_kernel = entry.f, entry.one_kernel

    def forward(self: Any, input: Any, quantizer: Any) -> Any:
        x = plain(input)
        if quantizer is None and one_kernel:
            return f(x)
        return _finish(f(wide(x)), quantizer, x.dtype)

    return forward


def _backward(name: str) -> Callable[..., Any]:
    entry = POINTWISE[name]
    gradient, one_kernel, function = entry.gradient, entry.one_kernel, f"d{name}"

    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: Any) -> Any:
        g, x = plain(grad), plain(fwd_input)
        check_gradient(g, x.shape, function)
        if quantizer is None and one_kernel and g.dtype is x.dtype:
            return gradient(g, x)
        return _finish(gradient(wide(g), wide(x)), quantizer, x.dtype)

    return backward


def _backward_with_bias(name: str) -> Callable[..., Any]:
    gradient, function = POINTWISE[name].gradient, f"dbias_d{name}"

    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: Any) -> list[Any]:
        g, x = plain(grad), plain(fwd_input)
        check_gradient(g, x.shape, function)
        dx = gradient(wide(g), wide(x))
        bias_grad = flat(dx).sum(0)
        return [bias_grad if g.dtype is torch.float32 else bias_grad.to(g.dtype), _finish(dx, quantizer, g.dtype)]

    return backward


def _row_scales(act_scales: Any, x: Tensor, function: str) -> Tensor:
    """``act_scales`` as a wide factor of each row of ``x``."""
    check_row_scales(act_scales, x, function)
    return wide(act_scales).reshape((*x.shape[:-1], 1))


def scaled_gate(name: str, function: str, x: Tensor, act_scales: Any, *options: float, interleave: int = 0) -> Tensor:
    """A gate of ``x`` times each row's scale, not rounded yet."""
    scales = _row_scales(act_scales, x, function)
    return GATES[name].f(*_halves(x, function, interleave), *options).mul_(scales)


def _scales_gradient(g: Tensor, activated: Tensor, act_scales: Tensor) -> Tensor:
    return activated.mul_(g).sum(-1).reshape(act_scales.shape).to(act_scales.dtype)


class ActivationKernels(ScaledActivations):
    gelu, dgelu, dbias_dgelu = _forward("gelu"), _backward("gelu"), _backward_with_bias("gelu")
    silu, dsilu, dbias_dsilu = _forward("silu"), _backward("silu"), _backward_with_bias("silu")
    relu, drelu, dbias_drelu = _forward("relu"), _backward("relu"), _backward_with_bias("relu")
    qgelu, dqgelu, dbias_dqgelu = _forward("qgelu"), _backward("qgelu"), _backward_with_bias("qgelu")
    srelu, dsrelu, dbias_dsrelu = _forward("srelu"), _backward("srelu"), _backward_with_bias("srelu")

    def gate(self, name: str, input: Any, quantizer: Any, *options: float) -> Any:
        x = plain(input)
        a, b = _halves(x, name)
        return _finish(GATES[name].f(a, b, *options), quantizer, x.dtype)

    def gate_gradient(self, name: str, function: str, grad: Any, fwd_input: Any, quantizer: Any, *options: float) -> Any:
        g, x = plain(grad), plain(fwd_input)
        a, b = _halves(x, function)
        check_gradient(g, a.shape, function)
        return _finish(_side_by_side(*GATES[name].gradient(wide(g), a, b, *options)), quantizer, x.dtype)

    def scaled_gate(self, name: str, input: Any, act_scales: Any, quantizer: Any, interleave: int, *options: float) -> Any:
        x = plain(input)
        return _finish(scaled_gate(name, f"scaled_{name}", x, act_scales, *options, interleave=interleave), quantizer, x.dtype)

    def scaled_gate_gradient(
        self, name: str, function: str, grad: Any, fwd_input: Any, act_scales: Any, quantizer: Any, interleave: int, compute: bool, *options: float
    ) -> tuple[Any, Tensor | None]:
        g, x = plain(grad), plain(fwd_input)
        scales, (a, b) = _row_scales(act_scales, x, function), _halves(x, function, interleave)
        check_gradient(g, a.shape, function)
        gate, g = GATES[name], wide(g)
        for_scales = _scales_gradient(g, gate.f(a, b, *options), act_scales) if compute else None
        dx = _side_by_side(*gate.gradient(g * scales, a, b, *options), interleave)
        return _finish(dx, quantizer, x.dtype), for_scales

    def scaled_srelu(self, input: Any, act_scales: Any, quantizer: Any) -> Any:
        x = plain(input)
        scales = _row_scales(act_scales, x, "scaled_srelu")
        return _finish(POINTWISE["srelu"].f(wide(x)).mul_(scales), quantizer, x.dtype)

    def scaled_dsrelu(self, grad: Any, fwd_input: Any, act_scales: Any, quantizer: Any, compute_scale_grad: bool = True) -> Any:
        g, x = plain(grad), plain(fwd_input)
        check_gradient(g, x.shape, "scaled_dsrelu")
        scales, srelu, point, g = _row_scales(act_scales, x, "scaled_dsrelu"), POINTWISE["srelu"], wide(x), wide(g)
        for_scales = _scales_gradient(g, srelu.f(point), act_scales) if compute_scale_grad else None
        return _finish(srelu.gradient(g * scales, point), quantizer, x.dtype), for_scales
