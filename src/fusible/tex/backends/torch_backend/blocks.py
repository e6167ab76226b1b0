"""Matrices as grids of blocks: the amax of each, and a factor for each. Blocks at the right and lower edge may be smaller."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["block_amax", "padded", "scale_blocks_"]

Block = tuple[int, int]


def block_amax(x: Tensor, block: Block) -> Tensor:
    """``max |x|`` of every ``block`` (rows, columns) of the matrix ``x``, fp32; NaN where an element is NaN."""
    rows, columns = block
    amax = torch.empty(-(-x.shape[0] // rows), -(-x.shape[1] // columns), dtype=torch.float32, device=x.device)
    for part, i, j in _tiles(x, block):
        amax[i, j] = part.abs().amax((1, 3))
    return amax


def scale_blocks_(x: Tensor, factors: Tensor, block: Block) -> Tensor:
    """Multiply every ``block`` of the matrix ``x`` by its factor, in place; returns ``x``."""
    for part, i, j in _tiles(x, block):
        part.mul_(factors[i, j][:, None, :, None])
    return x


def padded(matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``matrix`` in the upper left of zeros of ``shape``."""
    if tuple(matrix.shape) == shape:
        return matrix.contiguous()
    result = matrix.new_zeros(shape)
    result[: matrix.shape[0], : matrix.shape[1]] = matrix
    return result


def _tiles(x: Tensor, block: Block) -> Iterator[tuple[Tensor, slice, slice]]:
    """Views ``[block rows, rows, block columns, columns]`` that cover ``x``, of equal blocks each, with their places in the grid."""
    for rows, high, i in _spans(x.shape[0], block[0]):
        for columns, wide, j in _spans(x.shape[1], block[1]):
            part = x[rows, columns]
            yield part.unflatten(1, (part.shape[1] // wide, wide)).unflatten(0, (part.shape[0] // high, high)), i, j


def _spans(size: int, block: int) -> Iterator[tuple[slice, int, slice]]:
    """The part of a dimension that full blocks cover and the rest: elements, elements per block, blocks."""
    full = size // block
    if full:
        yield slice(0, full * block), block, slice(0, full)
    if size % block:
        yield slice(full * block, size), size % block, slice(full, full + 1)
