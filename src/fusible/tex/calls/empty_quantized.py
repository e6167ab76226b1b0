"""Quantized tensors of unspecified values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.tex.factories import build_quantized
from fusible.tex.formats import PLAIN, checked_format, scheme_of, usages
from fusible.tex.protocol import fp8_format, to_torch, transposed_shape

__all__ = ["empty_quantized"]


def empty_quantized(quantizer: Any, shape: Sequence[int], dtype: Any, device: Any, pin_memory: bool = False) -> Any:
    """A tensor with the copies that ``quantizer`` asks for; a plain one of ``dtype`` where it is None."""

    def empty(shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=pin_memory)

    form, nominal = scheme_of(quantizer).format, to_torch(dtype)
    if form is PLAIN:
        return empty(shape, nominal)
    rowwise, columnwise = usages(quantizer)
    if form.per_tensor:
        data, transposed = empty(shape) if rowwise else None, empty(transposed_shape(shape)) if columnwise else None
        buffers = {"data": data, "data_transpose": transposed, "scale_inv": empty((1,), torch.float32), "fp8_dtype": fp8_format(quantizer.dtype)}
        return build_quantized(quantizer, shape=tuple(shape), dtype=nominal, **buffers)
    form = checked_format(quantizer, shape)
    made = {name: empty(size, stored) for name, (size, stored) in form.buffer_specs(quantizer, shape, rowwise, columnwise).items()}
    return build_quantized(quantizer, shape=tuple(shape), dtype=nominal, **{name: made.get(name) for name in form.buffers}, **form.options(quantizer))
