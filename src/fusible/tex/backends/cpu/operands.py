"""Operands as the kernels read them: tensors of wide floats."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusible.tex.backends.cpu.quantize import dequantize
from fusible.tex.protocol import is_quantized, nominal

__all__ = ["plain", "unquantized"]


def plain(x: Any) -> Tensor:
    """``unquantized(x)``, contiguous."""
    return unquantized(x).contiguous()


def unquantized(x: Any) -> Tensor:
    """``x`` itself, or its value in its nominal dtype where it is quantized."""
    return dequantize(x, nominal(x)) if is_quantized(x) else x
