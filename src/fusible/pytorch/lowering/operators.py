"""Quantization in a graph: as torch's own arithmetic, or as two operators that an exporter finds again (ONNX's ``QuantizeLinear`` and
``DequantizeLinear``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = ["as_operators", "dequantize", "packed_dtype", "quantize"]

_operators: ContextVar[bool] = ContextVar("operators", default=False)
_PACKED = (torch.uint8, torch.float4_e2m1fn_x2)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@contextmanager
def as_operators() -> Iterator[None]:
    """Within it, what is traced has the operators ``fusible::quantize`` and ``fusible::dequantize``."""
    token = _operators.set(True)
    try:
        yield
    finally:
        _operators.reset(token)


def packed_dtype() -> torch.dtype:
    """That of codes of E2M1 in a graph, two to a byte, the even one low: bytes for torch's own arithmetic, which has no other for them."""
    return torch.float4_e2m1fn_x2 if _operators.get() else torch.uint8


def dequantize(codes: torch.Tensor, scale: torch.Tensor, block: int = 0) -> torch.Tensor:
    """``value * scale`` in fp32. ``codes [*, K]`` of an 8-bit float, or ``[*, K / 2]`` of ``packed_dtype``. ``scale``: fp32, of one element, or
    ``[*, K / block]`` where there is a ``block``."""
    return torch.ops.fusible.dequantize(codes, scale, block) if _operators.get() else _values(codes, scale, block)


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x / scale`` in an 8-bit float ``dtype``, to the nearest, saturating. ``scale``: fp32, of one element."""
    return torch.ops.fusible.quantize(x, scale, dtype) if _operators.get() else _codes(x, scale, dtype)


def _values(codes: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    values = _pairs(codes.view(torch.uint8)) if codes.dtype in _PACKED else codes.float()
    if not block:
        return values * scale
    if values.shape[-1] == scale.shape[-1] * block:
        return (values.unflatten(-1, (-1, block)) * scale.unsqueeze(-1)).flatten(-2)
    return values * scale.repeat_interleave(block, -1)[..., : values.shape[-1]]


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device=codes.device)
    return table[torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2).int()]


def _codes(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


@torch.library.custom_op("fusible::dequantize", mutates_args=())
def _dequantize(codes: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    return _values(codes, scale, block)


@_dequantize.register_fake
def _(codes: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    width = codes.shape[-1] * (2 if codes.dtype in _PACKED else 1)
    return codes.new_empty((*codes.shape[:-1], width), dtype=torch.float32)


@torch.library.custom_op("fusible::quantize", mutates_args=())
def _quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _codes(x, scale, dtype)


@_quantize.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype)
