"""Quantize, dequantize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.backends.torch_backend.kernels import TorchKernels
from fusible.tex.calls.empty_quantized import empty_quantized
from fusible.tex.formulas.quantize import QuantizeFormulas

__all__ = ["QuantizeKernels"]


class QuantizeKernels(TorchKernels, QuantizeFormulas):
    def create_empty_quantized_tensor(self, quantizer: Any, shape: Sequence[int], dtype: Any, device: Any, pin_memory: bool) -> Any:
        return empty_quantized(quantizer, shape, dtype, device, bool(pin_memory))
