"""Block-scaled torch tensors of every format, and the codecs by which torch computes with them."""

from __future__ import annotations

import torch

from fusible.tex.backends.torch_backend.arrays import TORCH
from fusible.tex.backends.torch_backend.block_fp8 import BLOCK_FP8
from fusible.tex.backends.torch_backend.blocks import padded
from fusible.tex.backends.torch_backend.nvfp4 import NVFP4_CODEC
from fusible.tex.calls.scale_order import swizzle, unswizzle
from fusible.tex.calls.seeds import draw_seeds
from fusible.tex.formats import NVFP4
from fusible.tex.formats.block_reading import BlockReader
from fusible.tex.formulas.block_formats import BlockTensors

__all__ = ["BLOCKS"]

BLOCKS = BlockTensors(
    arrays=TORCH,
    reader=BlockReader("torch", lambda shape, data: torch.zeros(shape, dtype=torch.float32, device=data.device), unswizzle),
    padded=padded,
    swizzle=swizzle,
    draw=lambda count, like: draw_seeds(count, like.device),
)
BLOCKS.reader.register({**BLOCK_FP8.codecs(), NVFP4: NVFP4_CODEC})
