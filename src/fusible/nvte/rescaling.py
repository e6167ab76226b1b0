"""A power of two times a quantized tensor: its elements stay, and what they are scaled by changes."""

from __future__ import annotations

import math
from typing import Any

from fusible import tex
from fusible.nvte.dtype import DType, QuantizedType, Type
from fusible.nvte.frameworks import te_to_torch_dtype
from fusible.nvte.tensor import Data, Tensor

__all__ = ["exponent_of", "is_rescalable", "rescale"]

_LARGEST = 254
"""The largest byte that stands for a power of two; 255 is no number."""


def exponent_of(factor: float) -> int | None:
    """``k`` where ``factor == 2^k``, else None."""
    mantissa, exponent = math.frexp(factor)
    return exponent - 1 if mantissa == 0.5 else None


def is_rescalable(type: Type) -> bool:
    """Whether ``rescale`` takes tensors of ``type``: each is quantized by one quantizer, with one kind of scale, which is fp32 or an exponent. Of
    another type, as bf16 and E4M3, a scale may have no room for the product."""
    if not isinstance(type, QuantizedType) or type.scheme is None:
        return False
    form = type.scheme.format
    if type.blocks is None:
        return bool(form.scale_fields)
    specs = type.blocks.buffer_specs(type.quantizer, (type.blocks.length, type.blocks.length), True, True)
    stored = te_to_torch_dtype(DType.Byte if form.scales_are_exponents else DType.Float32)
    return bool(form.scale_fields) and all([specs[name][1] is stored for name in form.scale_fields])


def rescale(x: Tensor, exponent: int) -> Tensor:
    """``2^exponent * x`` of a quantized tensor, exactly: what quantizing the product gives, where scales follow from the tensor.

    Scales that are powers of two, as those of MXFP8, stay within ``[2^-127, 2^127]``: of a block of zeros, and of one whose product is as good as 0
    or infinite.
    """
    assert isinstance(x.type, QuantizedType) and x.type.scheme is not None
    form = x.type.scheme.format
    fields: dict[str, Any] = x.data.get_metadata()
    for name in form.scale_fields:
        scales = fields[name]
        if scales is not None:
            fields[name] = _shifted(scales, exponent) if form.scales_are_exponents else tex.prim.scale(scales, 2.0**exponent, DType.Float32)
    return Tensor(x.data.__class__(**fields), x.type)


def _shifted(exponents: Data, by: int) -> Data:
    """``min(max(exponents + by, 0), 254)`` of bytes."""
    values = tex.prim.cast(exponents, DType.Float32)
    if by < 0:
        return tex.prim.cast(_at_least_0(_plus(values, float(by))), DType.Byte)
    room = _at_least_0(_plus(tex.prim.scale(values, -1.0), float(_LARGEST - by)))
    return tex.prim.cast(_plus(tex.prim.scale(room, -1.0), float(_LARGEST)), DType.Byte)


def _plus(x: Data, number: float) -> Data:
    return tex.prim.add(x, tex.prim.full((1,), number, DType.Float32, x))


def _at_least_0(x: Data) -> Data:
    return tex.relu(x, None)
