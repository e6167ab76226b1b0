"""Numbers per tile of a matrix, of which a flat slice is at hand: their amaxes, and values multiplied by the factor of their tile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.blocks import block_amax, scale_blocks_
from fusible.tex.calls.sharded_cast import Block, MatrixSlice, Rectangle

__all__ = ["cast_by_tiles", "tile_amaxes"]


def tile_amaxes(x: Tensor, part: MatrixSlice, block: Block) -> Tensor:
    """``max |x|`` of each tile, fp32; 0 for a tile that the slice does not reach."""
    amaxes = torch.zeros(part.tiles(block), dtype=torch.float32, device=x.device)
    flat = x.reshape(-1)
    for place in part.rectangles():
        found = block_amax(_cut(flat, place), block, (place.row, place.column))
        rows, columns = found.shape
        reached = _from(amaxes, place, block)[:rows, :columns]
        torch.maximum(reached, found, out=reached)
    return amaxes


def cast_by_tiles(x: Tensor, part: MatrixSlice, block: Block, factors: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
    """``encode(x * factors[tile])`` of the slice, uint8 ``[length]``; the product is fp32, and ``encode`` may overwrite it."""
    flat = x.reshape(-1)
    pieces = []
    for place in part.rectangles():
        values = _cut(flat, place).to(torch.float32, copy=True)
        pieces.append(encode(scale_blocks_(values, _from(factors, place, block), block, (place.row, place.column))).view(-1))
    if not pieces:
        return x.new_empty(0, dtype=torch.uint8)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _cut(flat: Tensor, place: Rectangle) -> Tensor:
    return flat[place.start : place.start + place.rows * place.columns].view(place.rows, place.columns)


def _from(numbers: Tensor, place: Rectangle, block: Block) -> Tensor:
    """The numbers of the tiles from the one on in which a rectangle begins."""
    return numbers[place.row // block[0] :, place.column // block[1] :]
