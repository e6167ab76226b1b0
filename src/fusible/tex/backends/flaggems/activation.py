"""GELU, SiLU and their gates by FlagGems' kernels, which compute in fp32 and round once.

Its ReLU gives 0 for NaN, forward and backward, alone and in a gate, and its GLU activates the other half: those are left to other backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusible.tex.backends.flaggems.operands import refused
from fusible.tex.calls.checks import check_gradient, check_width_even
from fusible.tex.interface.activation import Activation
from fusible.tex.interface.declare import Request, requires
from fusible.tex.protocol import QuantizerLike
from fusible.tex.selection.dispatch import hand_over

__all__ = ["ActivationKernels", "SWIGLU_DEVICES"]

SWIGLU_DEVICES = frozenset({"cuda"})
"""Where FlagGems' SwiGLU takes tensors; its gradient takes them anywhere."""

_OPTIONS = {"gelu": {"approximate": "tanh"}, "silu": {}}
"""Of each activation, how FlagGems is asked for tex's formula."""


def _backward_refused(request: Request) -> str | None:
    return refused(request) or (None if request["grad"] == request["fwd_input"] else "reads grad and fwd_input of one dtype")


def _swiglu_refused(request: Request) -> str | None:
    elsewhere = sorted(request.devices - SWIGLU_DEVICES)
    where = f"takes tensors on {', '.join(sorted(SWIGLU_DEVICES))} alone, and these are on {', '.join(elsewhere)}"
    return refused(request) or (where if elsewhere else None)


def _forward(name: str) -> Callable[..., Any]:
    @requires(refused)
    def forward(self: Any, input: Any, quantizer: QuantizerLike | None) -> Any:
        if not input.numel():
            return hand_over(self, name, input, quantizer)
        return getattr(self.gems, name)(input, **_OPTIONS[name]).contiguous()

    return forward


def _backward(name: str) -> Callable[..., Any]:
    @requires(_backward_refused)
    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: QuantizerLike | None) -> Any:
        check_gradient(grad, fwd_input.shape, f"d{name}")
        if not fwd_input.numel():
            return hand_over(self, f"d{name}", grad, fwd_input, quantizer)
        return getattr(self.gems, f"{name}_backward")(grad, fwd_input, **_OPTIONS[name]).contiguous()

    return backward


def _backward_with_bias(name: str) -> Callable[..., Any]:
    @requires(_backward_refused)
    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: QuantizerLike | None) -> list[Any]:
        check_gradient(grad, fwd_input.shape, f"dbias_d{name}")
        if not fwd_input.numel():
            return hand_over(self, f"dbias_d{name}", grad, fwd_input, quantizer)
        dx = getattr(self.gems, f"{name}_backward")(grad.float(), fwd_input.float(), **_OPTIONS[name])
        return [dx.reshape(-1, dx.shape[-1]).sum(0, dtype=torch.float32).to(grad.dtype), dx.contiguous().to(grad.dtype)]

    return backward


def _gate(name: str, why_not: Callable[[Request], str | None] = refused) -> Callable[..., Any]:
    @requires(why_not)
    def forward(self: Any, input: Any, quantizer: QuantizerLike | None) -> Any:
        check_width_even(input, name)
        return getattr(self.gems, name)(input) if input.numel() else hand_over(self, name, input, quantizer)

    return forward


def _gate_backward(name: str) -> Callable[..., Any]:
    @requires(_backward_refused)
    def backward(self: Any, grad: Any, fwd_input: Any, quantizer: QuantizerLike | None) -> Any:
        check_width_even(fwd_input, name)
        check_gradient(grad, (*fwd_input.shape[:-1], fwd_input.shape[-1] // 2), name)
        return getattr(self.gems, name)(grad, fwd_input) if fwd_input.numel() else hand_over(self, name, grad, fwd_input, quantizer)

    return backward


class ActivationKernels(Activation):
    gems: Any

    gelu, dgelu, dbias_dgelu = _forward("gelu"), _backward("gelu"), _backward_with_bias("gelu")
    silu, dsilu, dbias_dsilu = _forward("silu"), _backward("silu"), _backward_with_bias("silu")
    geglu, dgeglu = _gate("geglu"), _gate_backward("dgeglu")
    swiglu, dswiglu = _gate("swiglu", _swiglu_refused), _gate_backward("dswiglu")
