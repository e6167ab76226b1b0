"""The activations, for backends that have one function for all of a kind: which name, and which options, each passes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fusible.tex.activations import ELEMENTWISE, GATES
from fusible.tex.interface.activation import Activation
from fusible.tex.interface.arguments import Tensor
from fusible.tex.interface.declare import handing_on
from fusible.tex.protocol import QuantizerLike, TensorLike

__all__ = ["GatedActivations", "ScaledActivations", "elementwise", "give_method"]

C = TypeVar("C", bound=type)
Made = Callable[[str], Callable[..., Any]]
"""A method for the activation of a name."""


def elementwise(forward: Made, backward: Made, backward_with_bias: Made) -> Callable[[C], C]:
    """Give a backend's class the methods of every elementwise activation. Each is a function of its own: to go through a common one would cost a call
    more."""

    def give(cls: C) -> C:
        for row in ELEMENTWISE:
            for function, made in ((row.name, forward), (row.gradient, backward), (f"dbias_{row.gradient}", backward_with_bias)):
                give_method(cls, function, made(row.name))
        return cls

    return give


def give_method(cls: type, function: str, method: Callable[..., Any]) -> None:
    """Let ``method`` be that of ``cls`` for the function of tex, with its name."""
    method.__name__ = method.__qualname__ = function
    setattr(cls, function, method)


class GatedActivations(Activation):
    """A backend defines two methods; ``name`` is that of the gate, ``function`` the one of tex, ``options`` are the gate's, in tex's order."""

    HELPERS = frozenset({"gate", "gate_gradient"})

    def gate(self, name: str, input: Tensor, quantizer: QuantizerLike | None, *options: float) -> Any:
        """``gate(a, b)`` of the halves of ``input``."""
        raise NotImplementedError

    def gate_gradient(self, name: str, function: str, grad: Tensor, fwd_input: Tensor, quantizer: QuantizerLike | None, *options: float) -> Any:
        """The gradient of ``gate``."""
        raise NotImplementedError


class ScaledActivations(GatedActivations):
    """A backend defines two methods more, in which each row is multiplied by a number, and ``a`` and ``b`` may alternate in blocks."""

    HELPERS = frozenset({"scaled_gate", "scaled_gate_gradient"})

    def scaled_gate(self, name: str, input: Tensor, act_scales: TensorLike, quantizer: QuantizerLike | None, interleave: int, *options: float) -> Any:
        """``gate(a, b)`` times a number for each row."""
        raise NotImplementedError

    def scaled_gate_gradient(
        self, name: str, function: str, grad: Any, fwd_input: Any, act_scales: Any, quantizer: Any, interleave: int, compute: bool, *options: float
    ) -> Any:
        """The gradient of ``scaled_gate``, and where ``compute`` that of the numbers."""
        raise NotImplementedError


def _hand_on(cls: type, function: str, call: str) -> None:
    give_method(cls, function, handing_on(function, call))


for _row in GATES:
    _gate, _options = repr(_row.name), "".join(f", {option.name}" for option in _row.options)
    _hand_on(GatedActivations, _row.name, f"self.gate({_gate}, input, quantizer{_options})")
    _hand_on(GatedActivations, _row.gradient, f"self.gate_gradient({_gate}, {_row.gradient!r}, grad, fwd_input, quantizer{_options})")
    if _row.scaled:
        _function, _tensors = f"scaled_{_row.gradient}", "act_scales, quantizer, glu_interleave_size"
        _hand_on(ScaledActivations, f"scaled_{_row.name}", f"self.scaled_gate({_gate}, input, {_tensors}{_options})")
        _tensors = f"grad, fwd_input, {_tensors}, compute_scale_grad"
        _hand_on(ScaledActivations, _function, f"self.scaled_gate_gradient({_gate}, {_function!r}, {_tensors}{_options})")
