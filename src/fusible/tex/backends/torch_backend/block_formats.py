"""Block-scaled torch tensors of every format, and the codecs by which torch computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusible.tex.backends.torch_backend.arrays import TORCH
from fusible.tex.backends.torch_backend.block_fp8 import BLOCK_FP8
from fusible.tex.backends.torch_backend.blocks import padded
from fusible.tex.backends.torch_backend.nvfp4 import NVFP4_CODEC
from fusible.tex.calls.scale_order import swizzle, unswizzle
from fusible.tex.calls.seeds import draw_seeds
from fusible.tex.factories import build_quantized
from fusible.tex.formats import NVFP4, checked_format, usages
from fusible.tex.formats.block_reading import BlockReader
from fusible.tex.formulas.block_formats import BlockTensors
from fusible.tex.protocol import QuantizerLike

__all__ = ["BLOCKS", "empty_blocks"]

BLOCKS = BlockTensors(
    arrays=TORCH,
    reader=BlockReader("torch", lambda shape, data: torch.zeros(shape, dtype=torch.float32, device=data.device), unswizzle),
    padded=padded,
    swizzle=swizzle,
    draw=lambda count, like: draw_seeds(count, like.device),
)
BLOCKS.reader.register({**BLOCK_FP8.codecs(), NVFP4: NVFP4_CODEC})


def empty_blocks(quantizer: QuantizerLike, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool) -> Any:
    """A tensor of unspecified values with the copies that ``quantizer`` asks for."""
    form = checked_format(quantizer, shape)
    specs = form.buffer_specs(quantizer, shape, *usages(quantizer))
    made = {name: torch.empty(size, dtype=stored, device=device, pin_memory=pin_memory) for name, (size, stored) in specs.items()}
    return build_quantized(quantizer, shape=tuple(shape), dtype=dtype, **{name: made.get(name) for name in form.buffers}, **form.options(quantizer))
