"""Activations in torch: where a function is one kernel of torch's, which computes in fp32 and rounds once, that kernel alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusible.tex.backends.torch_backend.kernels import TorchKernels
from fusible.tex.backends.torch_backend.pointwise import GATES, POINTWISE
from fusible.tex.formulas.activation import ActivationFormulas
from fusible.tex.protocol import QuantizerLike

__all__ = ["ActivationKernels"]


class ActivationKernels(TorchKernels, ActivationFormulas):
    _pointwise, _gates = POINTWISE, GATES

    def _activated(self, name: str, x: Tensor, quantizer: QuantizerLike | None) -> Any:
        activation = POINTWISE[name]
        return activation.f(x) if quantizer is None and activation.one_kernel else super()._activated(name, x, quantizer)

    def _differentiated(self, name: str, g: Tensor, x: Tensor, quantizer: QuantizerLike | None) -> Any:
        activation = POINTWISE[name]
        if quantizer is None and activation.one_kernel and g.dtype is x.dtype:
            return activation.gradient(g, x)
        return super()._differentiated(name, g, x, quantizer)
