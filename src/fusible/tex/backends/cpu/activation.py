"""Activations by the compiled kernels: a formula in fp32, and its result as wide floats or FP8 with its transposed copy, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.activations import native_options
from fusible.tex.backends.cpu.layouts import as_read
from fusible.tex.backends.cpu.operands import plain
from fusible.tex.backends.cpu.output import produce
from fusible.tex.calls.activation import GatedActivations, elementwise
from fusible.tex.calls.checks import check_gradient, check_width_even
from fusible.tex.interface.declare import CallArguments
from fusible.tex.interface.specialize import SpecializedCall, specialized_by
from fusible.tex.protocol import QuantizerLike

__all__ = ["ActivationKernels"]


def _forward(name: str) -> Callable[..., Any]:
    def specialize(self: Any, call: CallArguments) -> SpecializedCall | None:
        if call.quantizer is not None or not as_read(call.input):
            return None
        kernel, dtype = native.activation, call.input.dtype

        def compute(x: Tensor) -> Tensor:
            y = torch.empty_like(x)
            kernel(name, x, y, dtype)
            return y

        return SpecializedCall(compute, (call.input,))

    @specialized_by(specialize)
    def forward(self: Any, input: Any, quantizer: QuantizerLike | None) -> Any:
        x = plain(input)
        return produce(native.activation, (name, x), x.shape, x.dtype, quantizer, like=x)

    return forward


def _backward(name: str) -> Callable[..., Any]:
    def specialize(self: Any, call: CallArguments) -> SpecializedCall | None:
        if call.quantizer is not None or not as_read(call.grad, call.fwd_input):
            return None
        kernel, dtype = native.activation_backward, call.fwd_input.dtype

        def compute(grad: Tensor, x: Tensor) -> Tensor:
            dx = torch.empty_like(x)
            kernel(name, grad, x, dx, dtype)
            return dx

        return SpecializedCall(compute, (call.grad, call.fwd_input))

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
        kernel, dtype, width, in_fp32 = native.activation_backward, x.dtype, x.shape[-1], x.dtype is torch.float32

        def compute(grad: Tensor, x: Tensor) -> list[Tensor]:
            bias_grad, dx = torch.empty(width, dtype=torch.float32), torch.empty_like(x)
            kernel(name, grad, x, dx, dtype, bias_grad=bias_grad)
            return [bias_grad if in_fp32 else bias_grad.to(dtype), dx]

        return SpecializedCall(compute, (call.grad, call.fwd_input))

    @specialized_by(specialize)
    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: QuantizerLike | None) -> list[Any]:
        g, x = plain(grad), plain(fwd_input)
        check_gradient(g, x.shape, f"dbias_d{name}")
        bias_grad = torch.empty(x.shape[-1], dtype=torch.float32)
        dx = produce(partial(native.activation_backward, bias_grad=bias_grad), (name, g, x), x.shape, g.dtype, quantizer, like=x)
        return [bias_grad if g.dtype is torch.float32 else bias_grad.to(g.dtype), dx]

    return backward


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


@elementwise(_forward, _backward, _backward_with_bias)
class ActivationKernels(GatedActivations):
    def gate(self, name: str, input: Any, quantizer: QuantizerLike | None, *options: float) -> Any:
        return _gated(input, quantizer, name, **native_options(name, options))

    def gate_gradient(self, name: str, function: str, grad: Any, fwd_input: Any, quantizer: QuantizerLike | None, *options: float) -> Any:
        return _dgated(grad, fwd_input, quantizer, name, function, **native_options(name, options))
