"""Numbers per tile of a matrix, of which a flat slice is at hand: their amaxes, and values multiplied by the factor of their tile."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fusible.tex.sharded_call import Block, MatrixSlice, Rectangle

__all__ = ["cast_by_tiles", "tile_amaxes"]


def tile_amaxes(x: Tensor, part: MatrixSlice, block: Block) -> Tensor:
    """``max |x|`` of each tile, in ``x``'s dtype; 0 for a tile that the slice does not reach."""
    amaxes = x.new_zeros(part.tiles(block))
    flat = x.reshape(-1)
    for place in part.rectangles():
        found = _reduced(_reduced(_cut(flat, place), 1, place.column % block[1], block[1]), 0, place.row % block[0], block[0])
        rows, columns = found.shape
        reached = amaxes[place.row // block[0] :, place.column // block[1] :][:rows, :columns]
        torch.maximum(reached, found, out=reached)
    return amaxes


def cast_by_tiles(x: Tensor, part: MatrixSlice, block: Block, factors: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
    """``encode(x * factors[tile])`` of the slice, uint8 ``[length]``; the product is fp32, and ``encode`` may overwrite it."""
    flat = x.reshape(-1)
    pieces = [encode(_spread(factors, place, block).mul_(_cut(flat, place))).view(-1) for place in part.rectangles()]
    if not pieces:
        return x.new_empty(0, dtype=torch.uint8)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _cut(flat: Tensor, place: Rectangle) -> Tensor:
    return flat[place.start : place.start + place.rows * place.columns].view(place.rows, place.columns)


def _spread(numbers: Tensor, place: Rectangle, block: Block) -> Tensor:
    """The number of the tile of every element of a rectangle, a new tensor."""
    first, last = place.row // block[0], (place.row + place.rows - 1) // block[0]
    columns = torch.arange(place.column, place.column + place.columns, device=numbers.device) // block[1]
    spread = numbers[first : last + 1].index_select(1, columns)
    if spread.shape[0] == place.rows:
        return spread
    rows = torch.arange(place.row, place.row + place.rows, device=numbers.device) // block[0] - first
    return spread.index_select(0, rows)


def _reduced(x: Tensor, dim: int, first: int, block: int) -> Tensor:
    """``max |x|`` of groups of ``block`` along ``dim``, where ``first`` elements of the first group come before ``x``.

    Head, whole groups and tail are reduced apart, so that nothing is padded.
    """
    if block == 1:
        return x
    size = x.shape[dim]
    head = min(-first % block, size)
    tail = (size - head) % block
    parts = zip(x.split([head, size - head - tail, tail], dim), (head, block, tail), strict=True)
    found = [torch.linalg.vector_norm(part.unflatten(dim, (-1, group)), math.inf, dim + 1) for part, group in parts if part.shape[dim]]
    return found[0] if len(found) == 1 else torch.cat(found, dim)
