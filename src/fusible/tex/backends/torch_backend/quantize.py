"""Quantize, dequantize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.block_formats import empty_blocks
from fusible.tex.backends.torch_backend.kernels import TorchKernels
from fusible.tex.factories import build_quantized
from fusible.tex.formats import PLAIN, scheme_of, usages
from fusible.tex.formulas.quantize import QuantizeFormulas
from fusible.tex.protocol import fp8_format, to_torch, transposed_shape

__all__ = ["QuantizeKernels"]


class QuantizeKernels(TorchKernels, QuantizeFormulas):
    def create_empty_quantized_tensor(self, quantizer: Any, shape: Sequence[int], dtype: Any, device: Any, pin_memory: bool) -> Any:
        form = scheme_of(quantizer).format
        if form is PLAIN:
            return torch.empty(tuple(shape), dtype=to_torch(dtype), device=device, pin_memory=bool(pin_memory))
        if not form.per_tensor:
            return empty_blocks(quantizer, shape, to_torch(dtype), device, bool(pin_memory))
        rowwise, columnwise = usages(quantizer)

        def empty(shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=bool(pin_memory))

        return build_quantized(
            quantizer,
            shape=tuple(shape),
            dtype=to_torch(dtype),
            data=empty(shape) if rowwise else None,
            data_transpose=empty(transposed_shape(shape)) if columnwise else None,
            scale_inv=empty((1,), torch.float32),
            fp8_dtype=fp8_format(quantizer.dtype),
        )
