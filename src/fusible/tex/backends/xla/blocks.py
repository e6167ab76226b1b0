"""Lazy matrices as grids of blocks: the amax of each, and a factor for each. Blocks at the right and lower edge may be smaller."""

from __future__ import annotations

from collections.abc import Callable

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.fp8 import magnitude

__all__ = ["block_amax", "padded", "scale_blocks"]

Block = tuple[int, int]


def block_amax(x: Tensor, block: Block) -> Tensor:
    """``max |x|`` of every ``block`` (rows, columns) of the matrix ``x``, fp32; NaN where an element is NaN."""
    tiles, _ = _tiles(x, block)
    return lazy.bitcast(lazy.max(magnitude(tiles), (1, 3)), lazy.float32)


def scale_blocks(x: Tensor, factors: Tensor, block: Block, scale: Callable[[Tensor, Tensor], Tensor] = lazy.mul) -> Tensor:
    """``scale(x, factor)`` of every ``block`` of the matrix ``x`` with its factor."""
    tiles, whole = _tiles(x, block)
    scaled = scale(tiles, factors[:, None, :, None])
    return lazy.reshape(scaled, whole)[: x.shape[0], : x.shape[1]]


def padded(matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``matrix`` in the upper left of zeros of ``shape``."""
    if matrix.shape == tuple(shape):
        return matrix
    return lazy.pad(matrix, [(0, wanted - size) for size, wanted in zip(matrix.shape, shape, strict=True)])


def _tiles(x: Tensor, block: Block) -> tuple[Tensor, tuple[int, int]]:
    """``x`` within zeros as ``[block rows, rows, block columns, columns]``, and the shape of the matrix that this is."""
    sizes = [min(size, length) for size, length in zip(x.shape, block, strict=True)]
    counts = [-(-size // length) for size, length in zip(x.shape, sizes, strict=True)]
    whole = (counts[0] * sizes[0], counts[1] * sizes[1])
    return lazy.reshape(padded(x, whole), (counts[0], sizes[0], counts[1], sizes[1])), whole
