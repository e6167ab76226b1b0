"""Activations: what surrounds any of the functions of ``pointwise``, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from fusible.tex.activations import ELEMENTWISE
from fusible.tex.calls.activation import ScaledActivations, elementwise, give_method
from fusible.tex.calls.checks import check_gradient, check_row_scales, check_width_even, check_width_of_blocks
from fusible.tex.formulas.arrays import Array, ArrayKernels
from fusible.tex.formulas.pointwise import Gate, Pointwise
from fusible.tex.interface.arguments import Tensor
from fusible.tex.protocol import QuantizerLike

__all__ = ["ActivationFormulas"]


def _forward(name: str) -> Callable[..., Any]:
    def forward(self: Any, input: Tensor, quantizer: QuantizerLike | None) -> Any:
        return self._activated(name, self._plain(input), quantizer)

    return forward


def _backward(name: str) -> Callable[..., Any]:
    def backward(self: Any, grad: Tensor, fwd_input: Tensor, quantizer: QuantizerLike | None) -> Any:
        g, x = self._plain(grad), self._plain(fwd_input)
        check_gradient(g, x.shape, f"d{name}")
        return self._differentiated(name, g, x, quantizer)

    return backward


def _backward_with_bias(name: str) -> Callable[..., Any]:
    def backward(self: Any, grad: Tensor, fwd_input: Tensor, quantizer: QuantizerLike | None) -> list[Any]:
        g, x = self._plain(grad), self._plain(fwd_input)
        check_gradient(g, x.shape, f"dbias_d{name}")
        return self._differentiated_with_bias(name, g, x, quantizer)

    return backward


def _scaled(name: str) -> Callable[..., Any]:
    def forward(self: Any, input: Tensor, act_scales: Array, quantizer: QuantizerLike | None) -> Any:
        x, xp = self._plain(input), self._arrays
        scales = self._row_scales(act_scales, x, f"scaled_{name}")
        return self._finish(xp.times(self._pointwise[name].f(xp.wide(x)), scales), quantizer, x.dtype)

    return forward


def _scaled_backward(name: str) -> Callable[..., Any]:
    def backward(
        self: Any, grad: Tensor, fwd_input: Tensor, act_scales: Array, quantizer: QuantizerLike | None, compute_scale_grad: bool = True
    ) -> Any:
        g, x, xp = self._plain(grad), self._plain(fwd_input), self._arrays
        check_gradient(g, x.shape, f"scaled_d{name}")
        scales, activation, point, g = self._row_scales(act_scales, x, f"scaled_d{name}"), self._pointwise[name], xp.wide(x), xp.wide(g)
        for_scales = self._scales_gradient(g, activation.f(point), act_scales) if compute_scale_grad else None
        return self._finish(activation.gradient(g * scales, point), quantizer, x.dtype), for_scales

    return backward


@elementwise(_forward, _backward, _backward_with_bias)
class ActivationFormulas(ArrayKernels, ScaledActivations):
    """A backend states its functions: ``_pointwise`` and ``_gates``."""

    _pointwise: ClassVar[Mapping[str, Pointwise]]
    _gates: ClassVar[Mapping[str, Gate]]

    def _activated(self, name: str, x: Array, quantizer: QuantizerLike | None) -> Any:
        return self._finish(self._pointwise[name].f(self._arrays.wide(x)), quantizer, x.dtype)

    def _differentiated(self, name: str, g: Array, x: Array, quantizer: QuantizerLike | None) -> Any:
        xp = self._arrays
        return self._finish(self._pointwise[name].gradient(xp.wide(g), xp.wide(x)), quantizer, x.dtype)

    def _differentiated_with_bias(self, name: str, g: Array, x: Array, quantizer: QuantizerLike | None) -> list[Any]:
        xp = self._arrays
        dx = self._pointwise[name].gradient(xp.wide(g), xp.wide(x))
        return [xp.cast(self._row_sum(dx), g.dtype), self._finish(dx, quantizer, g.dtype)]

    def gate(self, name: str, input: Tensor, quantizer: QuantizerLike | None, *options: float) -> Any:
        x = self._plain(input)
        return self._finish(self._gates[name].f(*self._halves(x, name), *options), quantizer, x.dtype)

    def gate_gradient(self, name: str, function: str, grad: Tensor, fwd_input: Tensor, quantizer: QuantizerLike | None, *options: float) -> Any:
        g, x = self._plain(grad), self._plain(fwd_input)
        a, b = self._halves(x, function)
        check_gradient(g, a.shape, function)
        return self._finish(self._side_by_side(*self._gates[name].gradient(self._arrays.wide(g), a, b, *options)), quantizer, x.dtype)

    def scaled_gate(self, name: str, input: Tensor, act_scales: Array, quantizer: QuantizerLike | None, interleave: int, *options: float) -> Any:
        x = self._plain(input)
        return self._finish(self._gate_by_rows(name, f"scaled_{name}", x, act_scales, *options, interleave=interleave), quantizer, x.dtype)

    def scaled_gate_gradient(
        self, name: str, function: str, grad: Any, fwd_input: Any, act_scales: Any, quantizer: Any, interleave: int, compute: bool, *options: float
    ) -> tuple[Any, Any]:
        g, x = self._plain(grad), self._plain(fwd_input)
        scales, (a, b) = self._row_scales(act_scales, x, function), self._halves(x, function, interleave)
        check_gradient(g, a.shape, function)
        gate, g = self._gates[name], self._arrays.wide(g)
        for_scales = self._scales_gradient(g, gate.f(a, b, *options), act_scales) if compute else None
        dx = self._side_by_side(*gate.gradient(g * scales, a, b, *options), interleave)
        return self._finish(dx, quantizer, x.dtype), for_scales

    def _gate_by_rows(self, name: str, function: str, x: Array, act_scales: Array, *options: float, interleave: int = 0) -> Any:
        """A gate of ``x`` times each row's scale, not rounded yet."""
        scales = self._row_scales(act_scales, x, function)
        return self._arrays.times(self._gates[name].f(*self._halves(x, function, interleave), *options), scales)

    def _row_scales(self, act_scales: Array, x: Array, function: str) -> Any:
        """``act_scales`` as a wide factor of each row of ``x``."""
        check_row_scales(act_scales, x, function)
        return self._arrays.reshape(self._arrays.wide(act_scales), (*x.shape[:-1], 1))

    def _scales_gradient(self, g: Array, activated: Array, act_scales: Array) -> Any:
        xp = self._arrays
        return xp.cast(xp.reshape(xp.sum(xp.times(activated, g), -1), act_scales.shape), act_scales.dtype)

    def _halves(self, x: Array, function: str, interleave: int = 0) -> tuple[Any, Any]:
        """The operands of a gate, wide; with ``interleave`` k they alternate in blocks of k."""
        check_width_even(x, function)
        check_width_of_blocks(x, interleave, function)
        xp = self._arrays
        if not interleave:
            return xp.halves(x)
        half = (*x.shape[:-1], x.shape[-1] // 2)
        a, b = xp.halves(xp.reshape(x, (*half[:-1], half[-1] // interleave, 2 * interleave)))
        return xp.reshape(a, half), xp.reshape(b, half)

    def _side_by_side(self, da: Array, db: Array, interleave: int = 0) -> Any:
        """The inverse of ``_halves``."""
        xp = self._arrays
        if not interleave:
            return xp.concatenate([da, db], -1)
        lead, half = da.shape[:-1], da.shape[-1]
        blocks = [xp.reshape(d, (*lead, half // interleave, interleave)) for d in (da, db)]
        return xp.reshape(xp.concatenate(blocks, -1), (*lead, 2 * half))


for _row in ELEMENTWISE:
    if _row.scaled:
        give_method(ActivationFormulas, f"scaled_{_row.name}", _scaled(_row.name))
        give_method(ActivationFormulas, f"scaled_{_row.gradient}", _scaled_backward(_row.name))
