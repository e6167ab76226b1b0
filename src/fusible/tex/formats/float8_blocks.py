"""FP8 with fp32 scales, one per 1x128 block or 128x128 tile (DeepSeek-AI 2024, arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusible.errors import ArgumentError, expected
from fusible.tex.formats.blocks import BlockFormat
from fusible.tex.formats.format import Marks, Scheme
from fusible.tex.protocol import fp8_format, outer

__all__ = ["FLOAT8_BLOCKS", "FLOAT8_BLOCKS_SCHEME", "Float8Blocks"]


class Float8Blocks(BlockFormat):
    """1x128 blocks lie with the blocks first, ``[ceil(K / 128), M]`` and ``[ceil(M / 128), K]``; 128x128 ones as tiles, transposed in the
    column-wise copy. The last dimension is padded to a multiple of 4."""

    name = "block"
    marks = Marks(("_is_2D_scaled", "_rowwise_data", "_columnwise_data"))
    length = 128
    whole = False
    scale_dtype = torch.float32
    swizzles = False

    def is_tiled(self, quantizer: Any) -> bool:
        return quantizer.block_scaling_dim == 2

    def has_tile_scales(self, x: Any) -> bool:
        return x._is_2D_scaled

    def rows_second(self, columnwise: bool, tiled: bool) -> bool:
        return tiled == columnwise

    def used_scales(self, shape: Sequence[int], columnwise: bool, tiled: bool) -> tuple[int, int]:
        rows, columns = outer(shape), shape[-1]
        row_blocks, column_blocks = -(-rows // self.length), -(-columns // self.length)
        if tiled:
            return (column_blocks, row_blocks) if columnwise else (row_blocks, column_blocks)
        return (row_blocks, columns) if columnwise else (column_blocks, rows)

    def scale_multiples(self, columnwise: bool) -> tuple[int, int]:
        return 1, 4

    def options(self, quantizer: Any) -> dict[str, Any]:
        return {"fp8_dtype": fp8_format(quantizer.dtype), "is_2D_scaled": self.is_tiled(quantizer)}

    def check_quantizer(self, quantizer: Any) -> None:
        super().check_quantizer(quantizer)
        if quantizer.block_scaling_dim not in (1, 2):
            got = quantizer.block_scaling_dim
            raise ArgumentError(expected("1 or 2", of="block_scaling_dim of a quantizer", got=got, do="pass 1 for 1x128 blocks, 2 for 128x128"))


FLOAT8_BLOCKS: Float8Blocks = Float8Blocks.value()
FLOAT8_BLOCKS_SCHEME = Scheme(FLOAT8_BLOCKS.name, FLOAT8_BLOCKS, Marks(("block_scaling_dim",)))
