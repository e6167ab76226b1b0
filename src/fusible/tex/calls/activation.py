"""The gated activations, for backends that have one function for all gates: which name, and which options, each passes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusible.tex.interface.activation import Activation
from fusible.tex.interface.declare import by_name

__all__ = ["GatedActivations", "ScaledActivations"]


def _forward(name: str) -> Callable[..., Any]:
    def forward(self: Any, input: Any, quantizer: Any) -> Any:
        return self.gate(name, input, quantizer)

    return forward


def _backward(name: str) -> Callable[..., Any]:
    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: Any) -> Any:
        return self.gate_gradient(name, f"d{name}", grad, fwd_input, quantizer)

    return backward


class GatedActivations(Activation):
    """A backend defines two methods; ``name`` is that of the gate, ``function`` the one of tex, ``options`` are the gate's, in tex's order."""

    HELPERS = frozenset({"gate", "gate_gradient"})

    def gate(self, name: str, input: Any, quantizer: Any, *options: float) -> Any:
        """``gate(a, b)`` of the halves of ``input``."""
        raise NotImplementedError

    def gate_gradient(self, name: str, function: str, grad: Any, fwd_input: Any, quantizer: Any, *options: float) -> Any:
        """The gradient of ``gate``."""
        raise NotImplementedError

    glu, dglu = _forward("glu"), _backward("glu")
    geglu, dgeglu = _forward("geglu"), _backward("geglu")
    qgeglu, dqgeglu = _forward("qgeglu"), _backward("qgeglu")
    reglu, dreglu = _forward("reglu"), _backward("reglu")
    sreglu, dsreglu = _forward("sreglu"), _backward("sreglu")
    swiglu, dswiglu = _forward("swiglu"), _backward("swiglu")

    def situglu(self, input: Any, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
        return self.gate("situglu", input, quantizer, beta1, beta2)

    def dsituglu(self, grad: Any, fwd_input: Any, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
        return self.gate_gradient("situglu", "dsituglu", grad, fwd_input, quantizer, beta1, beta2)

    def clamped_swiglu(self, input: Any, quantizer: Any, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> Any:
        return self.gate("clamped_swiglu", input, quantizer, limit, alpha, glu_linear_offset)

    @by_name
    def clamped_dswiglu(self, call: Any) -> Any:
        return self.gate_gradient(
            "clamped_swiglu", "clamped_dswiglu", call.grad, call.fwd_input, call.quantizer, call.limit, call.alpha, call.glu_linear_offset
        )


class ScaledActivations(GatedActivations):
    """A backend defines two methods more, in which each row is multiplied by a number, and ``a`` and ``b`` may alternate in blocks."""

    HELPERS = frozenset({"scaled_gate", "scaled_gate_gradient"})

    def scaled_gate(self, name: str, input: Any, act_scales: Any, quantizer: Any, interleave: int, *options: float) -> Any:
        """``gate(a, b)`` times a number for each row."""
        raise NotImplementedError

    def scaled_gate_gradient(
        self, name: str, function: str, grad: Any, fwd_input: Any, act_scales: Any, quantizer: Any, interleave: int, compute: bool, *options: float
    ) -> Any:
        """The gradient of ``scaled_gate``, and where ``compute`` that of the numbers."""
        raise NotImplementedError

    def scaled_swiglu(self, input: Any, act_scales: Any, quantizer: Any, glu_interleave_size: int = 0) -> Any:
        return self.scaled_gate("swiglu", input, act_scales, quantizer, glu_interleave_size)

    @by_name
    def scaled_dswiglu(self, call: Any) -> Any:
        given = (call.grad, call.fwd_input, call.act_scales, call.quantizer, call.glu_interleave_size, call.compute_scale_grad)
        return self.scaled_gate_gradient("swiglu", "scaled_dswiglu", *given)

    @by_name
    def scaled_situglu(self, call: Any) -> Any:
        return self.scaled_gate("situglu", call.input, call.act_scales, call.quantizer, call.glu_interleave_size, call.beta1, call.beta2)

    @by_name
    def scaled_dsituglu(self, call: Any) -> Any:
        given = (call.grad, call.fwd_input, call.act_scales, call.quantizer, call.glu_interleave_size, call.compute_scale_grad)
        return self.scaled_gate_gradient("situglu", "scaled_dsituglu", *given, call.beta1, call.beta2)

    @by_name
    def scaled_clamped_swiglu(self, call: Any) -> Any:
        return self.scaled_gate(
            "clamped_swiglu", call.input, call.act_scales, call.quantizer, call.glu_interleave_size, call.limit, call.alpha, call.glu_linear_offset
        )

    @by_name
    def scaled_clamped_dswiglu(self, call: Any) -> Any:
        given = (call.grad, call.fwd_input, call.act_scales, call.quantizer, call.glu_interleave_size, call.compute_scale_grad)
        return self.scaled_gate_gradient("clamped_swiglu", "scaled_clamped_dswiglu", *given, call.limit, call.alpha, call.glu_linear_offset)
