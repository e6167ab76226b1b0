"""Blocks of FP8 and MXFP8 on lazy tensors."""

from __future__ import annotations

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.arrays import LAZY, fp32
from fusible.tex.backends.xla.blocks import block_amax, scale_blocks
from fusible.tex.backends.xla.number_formats import encode_e8m0, reciprocal, scale_of_amax, times_power_of_two
from fusible.tex.formulas.block_fp8 import BlockFp8

__all__ = ["BLOCK_FP8"]


def _exponent(code: Tensor) -> Tensor:
    return lazy.cast(code, lazy.int32) - 127


def _multiplied(x: Tensor, code: Tensor) -> Tensor:
    """``x * 2^(code - 127)``; NaN for 0xFF."""
    return lazy.where(code == 0xFF, float("nan"), times_power_of_two(x, _exponent(code)))


def _divided(x: Tensor, code: Tensor) -> Tensor:
    """``x * 2^(127 - code)``; NaN for 0xFF."""
    return lazy.where(code == 0xFF, float("nan"), times_power_of_two(x, 0 - _exponent(code)))


BLOCK_FP8 = BlockFp8(
    arrays=LAZY,
    amax=block_amax,
    scaled=lambda x, factors, block: scale_blocks(fp32(x), factors, block),
    divided=lambda x, exponents, block: scale_blocks(fp32(x), exponents, block, _divided),
    multiplied=lambda x, exponents, block: scale_blocks(x, exponents, block, _multiplied),
    scale_of_amax=scale_of_amax,
    exponent=encode_e8m0,
    reciprocal=reciprocal,
    largest=lambda dtype: float(dtype.max),
)
