"""The scales of NVFP4: one fp32 number for a tensor, and one of E4M3 for each block of it. Source: NVIDIA 2025, arXiv:2509.25149.

Every step is fp32, rounded once, in the order in which it is written here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.fp8 import encode
from fusible.tex.enums import DType
from fusible.tex.formulas.number_formats import E2M1_MAX
from fusible.tex.protocol import FLT_MAX, FP8_MAX

__all__ = ["block_scale", "element_factor", "global_scale", "rounded_block_scale"]


def _finite(x: Tensor) -> Tensor:
    """``min(x, FLT_MAX)`` of numbers >= 0, NaN of NaN; overwrites ``x``."""
    return x.clamp_max_(FLT_MAX)


def global_scale(amax: Tensor, e4m3_max: float = FP8_MAX[DType.kFloat8E4M3]) -> Tensor:
    """``S = min(e4m3_max * 6 / amax, FLT_MAX)``, or 1 where ``amax`` is 0 or infinite."""
    scale = _finite(torch.full_like(amax, e4m3_max * E2M1_MAX) / amax)
    return scale.masked_fill_((amax == 0) | (scale == 0), 1.0)


def block_scale(block_amax: Tensor, scale: Tensor) -> Tensor:
    """``min(block_amax * (S * (1 / 6)), FLT_MAX)``: by what a code of the block is multiplied, in units of ``1 / S``."""
    return _finite(block_amax * (scale * (1 / E2M1_MAX)))


def rounded_block_scale(scale: Tensor) -> Tensor:
    """The E4M3 bytes of block scales."""
    return encode(scale.clone(), DType.kFloat8E4M3)


def element_factor(rounded: Tensor, scale: Tensor) -> Tensor:
    """``min(1 / (rounded * (1 / S)), FLT_MAX)`` of block scales that E4M3 holds: by what an element is multiplied before it is cast to E2M1."""
    return _finite((rounded * scale.reciprocal()).reciprocal_())
