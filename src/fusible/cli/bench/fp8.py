"""FP8 by Fusible and by plain torch, as several tables need it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible import tex
from fusible.quantized import FP8_MAX, Float8CurrentScalingQuantizer, Float8Quantizer, Float8TensorStorage, Quantizer
from fusible.tex import DType

__all__ = ["BF16", "E4M3", "E5M2", "cast", "delayed", "fp8", "product", "transpose"]

BF16, E4M3, E5M2 = DType.kBFloat16, DType.kFloat8E4M3, DType.kFloat8E5M2
Operand = Tensor | Float8TensorStorage
_TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def cast(x: Tensor, scale: Tensor, dtype: DType = E4M3) -> Tensor:
    """What plain torch does for a cast to FP8, in the dtype of ``x``: scale (a tensor without dimensions), clamp, convert."""
    return (x * scale).clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(_TORCH[dtype])


def transpose(codes: Tensor) -> Tensor:
    """The transposed copy, by plain torch."""
    return codes.view(torch.uint8).t().contiguous()


def delayed(scale: Tensor, dtype: DType = E4M3, *, columnwise: bool = False) -> Float8Quantizer:
    """A quantizer of delayed scaling."""
    return Float8Quantizer(scale.reshape(1), torch.zeros(1), dtype, columnwise=columnwise)


def fp8(x: Tensor) -> Float8TensorStorage:
    """``x`` in E4M3 by its own amax, without a transposed copy."""
    return Float8CurrentScalingQuantizer(E4M3, columnwise=False)(x)


def product(
    a: Operand, b: Operand, layout: str = "TN", *, quantizer: Quantizer | None = None, bias: Tensor | None = None, gelu: bool = False
) -> list[Any]:
    """``tex.generic_gemm(a, b)`` in a layout ("TN", "NN" or "NT"), to bfloat16 or as ``quantizer`` says."""
    turned = [letter == "T" for letter in layout]
    return tex.generic_gemm(a, turned[0], b, turned[1], None, quantizer, BF16, bias, BF16, gelu, None, False, None, 0, False, True)
