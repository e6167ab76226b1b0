"""Matrices as grids of blocks: the amax of each, and a factor for each. Blocks at the edges may be smaller.

``origin``: the place of the matrix in a larger one, whose blocks they are, by its first row and column: where that is within a block, what comes
before it is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["block_amax", "padded", "scale_blocks_"]

Block = tuple[int, int]


def block_amax(x: Tensor, block: Block, origin: Block = (0, 0)) -> Tensor:
    """``max |x|`` of every ``block`` (rows, columns) of the matrix ``x``, fp32; NaN where an element is NaN."""
    counts = [-(-(first % high + size) // high) for size, high, first in zip(x.shape, block, origin, strict=True)]
    amax = torch.empty(counts, dtype=torch.float32, device=x.device)
    for part, i, j in _tiles(x, block, origin):
        amax[i, j] = part.abs().amax((1, 3))
    return amax


def scale_blocks_(x: Tensor, factors: Tensor, block: Block, origin: Block = (0, 0)) -> Tensor:
    """Multiply every ``block`` of the matrix ``x`` by its factor, in place; returns ``x``."""
    for part, i, j in _tiles(x, block, origin):
        part.mul_(factors[i, j][:, None, :, None])
    return x


def padded(matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``matrix`` in the upper left of zeros of ``shape``."""
    if tuple(matrix.shape) == shape:
        return matrix.contiguous()
    result = matrix.new_zeros(shape)
    result[: matrix.shape[0], : matrix.shape[1]] = matrix
    return result


def _tiles(x: Tensor, block: Block, origin: Block) -> Iterator[tuple[Tensor, slice, slice]]:
    """Views ``[block rows, rows, block columns, columns]`` that cover ``x``, of equal blocks each, with their places in the grid."""
    for rows, high, i in _spans(x.shape[0], block[0], origin[0]):
        for columns, wide, j in _spans(x.shape[1], block[1], origin[1]):
            part = x[rows, columns]
            yield part.unflatten(1, (part.shape[1] // wide, wide)).unflatten(0, (part.shape[0] // high, high)), i, j


def _spans(size: int, block: int, first: int) -> Iterator[tuple[slice, int, slice]]:
    """The rest of a block that began before, what full blocks cover, and the beginning of another: elements, elements per block, blocks."""
    head = min(-first % block, size)
    full, tail = divmod(size - head, block)
    begun = int(head > 0)
    for start, length, wide, place, count in (
        (0, head, head, 0, begun),
        (head, full * block, block, begun, full),
        (size - tail, tail, tail, begun + full, 1),
    ):
        if length:
            yield slice(start, start + length), wide, slice(place, place + count)
