"""The product of a linear layer, whose operands a recipe may want in 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from fusible import ops
from fusible.errors import ArgumentError, expected
from fusible.nvte import QuantizedType, Type, current_pass, te_to_torch_dtype
from fusible.pytorch.lowering.codes import FP8
from fusible.pytorch.lowering.operators import dequantize, quantize
from fusible.pytorch.lowering.pointwise import wide
from fusible.pytorch.lowering.registry import Args, lowers, written
from fusible.tex import DType
from fusible.tex.formats import CURRENT, DELAYED, Scheme

__all__: list[str] = []


@lowers(ops.MMT)
def _product(op: ops.MMT, x: torch.Tensor, args: Args) -> torch.Tensor:
    x = _operand(x, op.x_dtype).to(te_to_torch_dtype(op.activation))
    return written(F.linear(x, args["weight"].to(x.dtype)), op.y_dtype)


def _operand(x: torch.Tensor, type: Type | None) -> torch.Tensor:
    """``x`` as the product reads it: the values of what it is quantized to."""
    if not isinstance(type, QuantizedType):
        return written(x, type)
    found = _SCALES.get(type.scheme) if type.scheme is not None else None
    if found is None:
        of, do = "a model to export whose activations are quantized", "hold its weights in that format, and export it outside of autocast"
        raise ArgumentError(expected("delayed or current scaling", of=of, got=str(type), do=do))
    scale = found(x, type)
    return dequantize(quantize(wide(x), scale, FP8[DType(int(type.dtype))]), scale)


def _delayed(x: torch.Tensor, type: QuantizedType) -> torch.Tensor:
    return torch.full((), current_pass().scale(type.slot), dtype=torch.float32, device=x.device)


def _current(x: torch.Tensor, type: QuantizedType) -> torch.Tensor:
    """``amax / fp8_max``; 1 for a tensor of zeros."""
    quantizer = type.descriptor
    largest = torch.finfo(FP8[DType(int(type.dtype))]).max
    amax = wide(x).abs().flatten().amax(0).clamp_min(getattr(quantizer, "amax_epsilon", 0.0))
    scale = torch.where(amax > 0, amax / largest, 1.0)
    return torch.exp2(torch.ceil(torch.log2(scale))) if getattr(quantizer, "force_pow_2_scales", False) else scale


_SCALES: dict[Scheme, Callable[[torch.Tensor, QuantizedType], torch.Tensor]] = {DELAYED: _delayed, CURRENT: _current}
"""By scheme: fp32 scales by which a tensor is divided, of one element."""
