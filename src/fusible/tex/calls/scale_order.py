"""The order of block scales that matrix products of NVIDIA read, and back: one tile of 512 bytes for each 128 rows and 4 blocks of a row.

A scale matrix ``[R, C]`` has a row for each of ``R`` vectors and a column for each block of one, padded to ``R % 128 == 0`` and ``C % 4 == 0``. Where
the vectors are columns (MXFP8's column-wise scales, ``[C, R]``), its transpose is what is ordered. The bytes are permuted, the shape stays.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusible.errors import ShapeError, expected

__all__ = ["swizzle", "unswizzle", "without_padding"]


def swizzle(scales: Tensor, columnwise: bool = False) -> Tensor:
    """``[..., R, C]`` (``[..., C, R]`` where ``columnwise``) in the order ``[R / 128, C / 4, 32, 4, 4]``: row within 32, group of 32 rows, block."""
    batch, rows, blocks = _tiles(scales, columnwise)
    if columnwise:
        return scales.reshape(batch, blocks, 4, rows, 4, 32).permute(0, 3, 1, 5, 4, 2).reshape(scales.shape)
    return scales.reshape(batch, rows, 4, 32, blocks, 4).permute(0, 1, 4, 3, 2, 5).reshape(scales.shape)


def unswizzle(scales: Tensor, columnwise: bool = False) -> Tensor:
    """The inverse of ``swizzle``."""
    batch, rows, blocks = _tiles(scales, columnwise)
    order = (0, 2, 5, 1, 4, 3) if columnwise else (0, 1, 4, 3, 2, 5)
    return scales.reshape(batch, rows, blocks, 32, 4, 4).permute(order).reshape(scales.shape)


def without_padding(scales: Tensor, lines: int, blocks: int) -> Tensor:
    """A matrix of scales with zeros outside its first ``lines`` and ``blocks``; itself where nothing lies outside. A product that reads whole tiles
    then multiplies what is padded by 2^-127 at most, whatever the memory held."""
    if tuple(scales.shape) == (lines, blocks):
        return scales
    result = torch.zeros_like(scales)
    result[:lines, :blocks] = scales[:lines, :blocks]
    return result


def _tiles(scales: Tensor, columnwise: bool) -> tuple[int, int, int]:
    """Matrices, tiles down and tiles across. Raises ``ShapeError`` where a matrix is not padded to whole tiles."""
    rows, blocks = (scales.shape[-2:][::-1] if columnwise else scales.shape[-2:]) if scales.dim() > 1 else (1, 1)
    if rows % 128 or blocks % 4:
        wanted = "[..., 4 n, 128 m]" if columnwise else "[..., 128 m, 4 n]"
        raise ShapeError(expected(wanted, of="block scales", got=list(scales.shape), do="pad them as their format says"))
    return math.prod(scales.shape[:-2]), rows // 128, blocks // 4
