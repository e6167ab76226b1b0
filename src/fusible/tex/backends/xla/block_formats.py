"""Block-scaled lazy tensors of every format, and the codecs by which programs compute with them."""

from __future__ import annotations

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.arrays import LAZY
from fusible.tex.backends.xla.block_fp8 import BLOCK_FP8
from fusible.tex.backends.xla.blocks import padded
from fusible.tex.backends.xla.native_blocks import with_kernels
from fusible.tex.backends.xla.nvfp4 import NVFP4_CODEC
from fusible.tex.backends.xla.random import next_seed
from fusible.tex.formats import NVFP4
from fusible.tex.formats.block_reading import BlockReader
from fusible.tex.formulas.block_formats import BlockTensors

__all__ = ["BLOCKS"]


def _swizzled(scales: Tensor, columnwise: bool) -> Tensor:
    """``[R, C]`` (``[C, R]`` where ``columnwise``) in the order ``[R / 128, C / 4, 32, 4, 4]``: row within 32, group of 32 rows, block."""
    lines = lazy.transpose(scales, 0, 1) if columnwise else scales
    rows, blocks = lines.shape
    tiles = lazy.reshape(lines, (rows // 128, 4, 32, blocks // 4, 4))
    return lazy.reshape(lazy.permute(tiles, (0, 3, 2, 1, 4)), scales.shape)


def _unswizzled(scales: Tensor, columnwise: bool) -> Tensor:
    """The inverse of ``_swizzled``."""
    rows, blocks = scales.shape[::-1] if columnwise else scales.shape
    tiles = lazy.reshape(scales, (rows // 128, blocks // 4, 32, 4, 4))
    lines = lazy.reshape(lazy.permute(tiles, (0, 3, 2, 1, 4)), (rows, blocks))
    return lazy.transpose(lines, 0, 1) if columnwise else lines


def _drawn(count: int, like: Tensor) -> None:
    for _ in range(count):
        next_seed(like, "stochastic rounding")


BLOCKS = BlockTensors(
    arrays=LAZY,
    reader=BlockReader("lazy", lambda shape, data: lazy.zeros(shape), _unswizzled),
    padded=padded,
    swizzle=_swizzled,
    draw=_drawn,
)
BLOCKS.reader.register({form: with_kernels(form, codec) for form, codec in {**BLOCK_FP8.codecs(), NVFP4: NVFP4_CODEC}.items()})
