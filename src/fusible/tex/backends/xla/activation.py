"""Activations on lazy tensors: formulas, or the native kernels where these are faster."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.activations import native_options
from fusible.tex.backends.xla import native
from fusible.tex.backends.xla.arrays import LAZY
from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.backends.xla.native import Result
from fusible.tex.backends.xla.quantizing import produce
from fusible.tex.calls.checks import check_gradient, check_width_even
from fusible.tex.formulas.activation import ActivationFormulas
from fusible.tex.formulas.pointwise import Functions
from fusible.tex.protocol import QuantizerLike

__all__ = ["ActivationKernels", "POINTWISE"]

_functions = Functions(LAZY)
POINTWISE = _functions.pointwise


class ActivationKernels(LazyKernels, ActivationFormulas):
    _pointwise, _gates = POINTWISE, _functions.gates

    def _activated(self, name: str, x: Tensor, quantizer: QuantizerLike | None) -> Any:
        if not native.serves(x):
            return super()._activated(name, x, quantizer)
        return produce("activation", {"name": name, "src": x}, x.shape, x.dtype, quantizer)[0]

    def _differentiated(self, name: str, g: Tensor, x: Tensor, quantizer: QuantizerLike | None) -> Any:
        if not native.serves(g, x):
            return super()._differentiated(name, g, x, quantizer)
        return produce("activation_backward", {"name": name, "grad": g, "src": x}, x.shape, x.dtype, quantizer)[0]

    def _differentiated_with_bias(self, name: str, g: Tensor, x: Tensor, quantizer: QuantizerLike | None) -> list[Any]:
        if not native.serves(g, x):
            return super()._differentiated_with_bias(name, g, x, quantizer)
        arguments = {"name": name, "grad": g, "src": x, "bias_grad": Result((x.shape[-1],), lazy.float32)}
        dx, written = produce("activation_backward", arguments, x.shape, g.dtype, quantizer)
        return [lazy.cast(written["bias_grad"], g.dtype), dx]

    def gate(self, name: str, input: Any, quantizer: QuantizerLike | None, *options: float) -> Any:
        x = self._plain(input)
        if not native.serves(x):
            return super().gate(name, x, quantizer, *options)
        check_width_even(x, name)
        return produce("gated_activation", {"name": name, "src": x, **native_options(name, options)}, _halved(x), x.dtype, quantizer)[0]

    def gate_gradient(self, name: str, function: str, grad: Any, fwd_input: Any, quantizer: QuantizerLike | None, *options: float) -> Any:
        g, x = self._plain(grad), self._plain(fwd_input)
        if not native.serves(g, x):
            return super().gate_gradient(name, function, g, x, quantizer, *options)
        check_width_even(x, function)
        check_gradient(g, _halved(x), function)
        arguments = {"name": name, "grad": g, "src": x, **native_options(name, options)}
        return produce("gated_activation_backward", arguments, x.shape, x.dtype, quantizer)[0]


def _halved(x: Tensor) -> tuple[int, ...]:
    return *x.shape[:-1], x.shape[-1] // 2
