"""Activations by the compiled kernels: a formula in fp32, and its result as wide floats or FP8 with its transposed copy, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.activations import GATES, native_options
from fusible.tex.backends.cpu.kernel_calls import call as kernel_call
from fusible.tex.backends.cpu.kernel_calls import specialized
from fusible.tex.backends.cpu.layouts import HOST, as_read
from fusible.tex.backends.cpu.operands import plain
from fusible.tex.backends.cpu.output import produce
from fusible.tex.backends.cpu.sums import rounded
from fusible.tex.calls.activation import GatedActivations, elementwise
from fusible.tex.calls.checks import check_gradient, check_width_even
from fusible.tex.interface.declare import CallArguments, inherited
from fusible.tex.interface.kernel_calls import Buffer
from fusible.tex.interface.specialize import SpecializedCall, specialized_by
from fusible.tex.protocol import QuantizerLike

__all__ = ["ActivationKernels"]


def _forward(name: str) -> Callable[..., Any]:
    def specialize(self: Any, call: CallArguments) -> SpecializedCall | None:
        if call.quantizer is not None or not as_read(call.input):
            return None
        y = _buffer_like(call.input)
        return specialized(y, kernel_call("activation", name=name, src=call.input, dst=y, dtype=y.dtype))

    @specialized_by(specialize)
    def forward(self: Any, input: Any, quantizer: QuantizerLike | None) -> Any:
        x = plain(input)
        return produce(native.activation, (name, x), x.shape, x.dtype, quantizer, like=x)

    return forward


def _backward(name: str) -> Callable[..., Any]:
    def specialize(self: Any, call: CallArguments) -> SpecializedCall | None:
        if call.quantizer is not None or not as_read(call.grad, call.fwd_input):
            return None
        dx = _buffer_like(call.fwd_input)
        return specialized(dx, kernel_call("activation_backward", name=name, grad=call.grad, src=call.fwd_input, dst=dx, dtype=dx.dtype))

    @specialized_by(specialize)
    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: QuantizerLike | None) -> Any:
        g, x = plain(grad), plain(fwd_input)
        check_gradient(g, x.shape, f"d{name}")
        return produce(native.activation_backward, (name, g, x), x.shape, x.dtype, quantizer, like=x)

    return backward


def _backward_with_bias(name: str) -> Callable[..., Any]:
    def specialize(self: Any, call: CallArguments) -> SpecializedCall | None:
        grad, x = call.grad, call.fwd_input
        if call.quantizer is not None or not as_read(grad, x) or grad.dtype is not x.dtype:
            return None
        sums, dx = Buffer(torch.float32, (x.shape[-1],)), _buffer_like(x)
        gradient = kernel_call("activation_backward", name=name, grad=grad, src=x, dst=dx, dtype=dx.dtype, bias_grad=sums)
        bias_grad = rounded(sums, x.dtype)
        return None if bias_grad is None else specialized([bias_grad[0], dx], gradient, *bias_grad[1])

    @specialized_by(specialize)
    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: QuantizerLike | None) -> list[Any]:
        g, x = plain(grad), plain(fwd_input)
        check_gradient(g, x.shape, f"dbias_d{name}")
        bias_grad = torch.empty(x.shape[-1], dtype=torch.float32, device=HOST)
        dx = produce(partial(native.activation_backward, bias_grad=bias_grad), (name, g, x), x.shape, g.dtype, quantizer, like=x)
        return [bias_grad if g.dtype is torch.float32 else bias_grad.to(g.dtype), dx]

    return backward


def _buffer_like(x: Tensor) -> Buffer:
    return Buffer(x.dtype, tuple(x.shape))


def _gate(name: str, parameters: Sequence[str]) -> Callable[[Any, CallArguments], SpecializedCall | None]:
    def specialize(self: Any, call: CallArguments) -> SpecializedCall | None:
        x = call.input
        if call.quantizer is not None or not as_read(x):
            return None
        y = Buffer(x.dtype, (*x.shape[:-1], x.shape[-1] // 2))
        options = native_options(name, tuple(getattr(call, parameter) for parameter in parameters))
        return specialized(y, kernel_call("gated_activation", name=name, src=x, dst=y, dtype=x.dtype, **options))

    return specialize


def _gate_gradient(name: str, parameters: Sequence[str]) -> Callable[[Any, CallArguments], SpecializedCall | None]:
    def specialize(self: Any, call: CallArguments) -> SpecializedCall | None:
        x = call.fwd_input
        if call.quantizer is not None or not as_read(call.grad, x):
            return None
        dx, options = _buffer_like(x), native_options(name, tuple(getattr(call, parameter) for parameter in parameters))
        return specialized(dx, kernel_call("gated_activation_backward", name=name, grad=call.grad, src=x, dst=dx, dtype=x.dtype, **options))

    return specialize


def _gated(x: Any, quantizer: QuantizerLike | None, name: str, **parameters: float) -> Any:
    x = plain(x)
    check_width_even(x, name)
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    return produce(partial(native.gated_activation, **parameters), (name, x), shape, x.dtype, quantizer)


def _dgated(grad: Any, x: Any, quantizer: QuantizerLike | None, name: str, function: str, **parameters: float) -> Any:
    g, x = plain(grad), plain(x)
    check_width_even(x, function)
    check_gradient(g, (*x.shape[:-1], x.shape[-1] // 2), function)
    return produce(partial(native.gated_activation_backward, **parameters), (name, g, x), x.shape, x.dtype, quantizer)


def _with_specialized_gates(cls: type[GatedActivations]) -> type[GatedActivations]:
    for row in GATES:
        parameters = [option.name for option in row.options]
        for function, rule in ((row.name, _gate), (row.gradient, _gate_gradient)):
            setattr(cls, function, specialized_by(rule(row.name, parameters))(inherited(getattr(cls, function))))
    return cls


@_with_specialized_gates
@elementwise(_forward, _backward, _backward_with_bias)
class ActivationKernels(GatedActivations):
    def gate(self, name: str, input: Any, quantizer: QuantizerLike | None, *options: float) -> Any:
        return _gated(input, quantizer, name, **native_options(name, options))

    def gate_gradient(self, name: str, function: str, grad: Any, fwd_input: Any, quantizer: QuantizerLike | None, *options: float) -> Any:
        return _dgated(grad, fwd_input, quantizer, name, function, **native_options(name, options))
