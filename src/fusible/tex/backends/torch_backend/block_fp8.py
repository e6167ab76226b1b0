"""Blocks of FP8 and MXFP8 in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.arrays import TORCH
from fusible.tex.backends.torch_backend.blocks import Block, block_amax, scale_blocks_
from fusible.tex.backends.torch_backend.number_formats import decode_e8m0, encode_e8m0, factor_of_e8m0, scale_of_amax
from fusible.tex.formulas.block_fp8 import BlockFp8

__all__ = ["BLOCK_FP8"]


def _scaled(x: Tensor, factors: Tensor, block: Block) -> Tensor:
    return scale_blocks_(x.to(torch.float32, copy=True), factors, block)


BLOCK_FP8 = BlockFp8(
    arrays=TORCH,
    amax=block_amax,
    scaled=_scaled,
    divided=lambda x, exponents, block: _scaled(x, factor_of_e8m0(exponents), block),
    multiplied=lambda x, exponents, block: scale_blocks_(x, decode_e8m0(exponents), block),
    scale_of_amax=scale_of_amax,
    exponent=lambda amax, factor: encode_e8m0(amax.mul_(factor)),
    reciprocal=Tensor.reciprocal_,
    largest=lambda dtype: torch.finfo(dtype).max,
)
