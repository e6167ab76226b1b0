"""Slices of a sharded weight: the rectangles that one consists of, and the checks of the functions that cast them.

Whatever has ``shape`` and ``dtype`` is a tensor here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.protocol import TensorLike

__all__ = ["Block", "MatrixSlice", "Rectangle", "check_expansion", "check_fragment", "check_slice", "check_tiles", "square"]

Block = tuple[int, int]
"""Rows and columns of the tile that shares one scale."""


class Rectangle(NamedTuple):
    """Elements ``start : start + rows * columns`` of a slice, which are whole rows of the weight or a part of one row."""

    start: int
    row: int
    column: int
    rows: int
    columns: int


class MatrixSlice(NamedTuple):
    """Elements ``start : start + length`` of a row-major matrix ``[rows, columns]``."""

    rows: int
    columns: int
    start: int
    length: int

    def rectangles(self) -> list[Rectangle]:
        """At most three: the rest of a row, whole rows, and the beginning of one."""
        found = []
        at, end = self.start, self.start + self.length
        while at < end:
            row, column = divmod(at, self.columns)
            whole = 0 if column else (end - at) // self.columns
            columns = self.columns if whole else min(self.columns - column, end - at)
            found.append(Rectangle(at - self.start, row, column, whole or 1, columns))
            at += (whole or 1) * columns
        return found

    def tiles(self, block: Block) -> tuple[int, int]:
        """How many tiles the whole matrix has, down and across."""
        return -(-self.rows // block[0]), -(-self.columns // block[1])


def square(block_len: int, function: str) -> Block:
    """The square tile of ``block_len``. Raises ``ArgumentError`` for a length below 1."""
    if block_len < 1:
        raise ArgumentError(expected("at least 1", of=f"block_len of {function}", got=block_len, do="pass the width of a tile"))
    return block_len, block_len


def check_slice(x: TensorLike, rows: int, columns: int, start: int, function: str, floating: frozenset[Any]) -> MatrixSlice:
    """``x`` as a slice of the weight. Raises unless it is of a floating type and lies within."""
    if x.dtype not in floating:
        raise DTypeError(expected("float32, bfloat16 or float16", of=f"the master weight of {function}", got=x.dtype, do="cast it"))
    length = math.prod(x.shape)
    if min(rows, columns, start) < 0 or start + length > rows * columns:
        of, got = f"the slice by start_offset of {function}", f"{start} to {start + length}"
        raise ShapeError(expected(f"elements within 0 to {rows * columns}", of=of, got=got, do="pass where it lies"))
    return MatrixSlice(rows, columns, start, length)


def check_tiles(tiles: TensorLike, part: MatrixSlice, block: Block, of: str, dtypes: Sequence[Any]) -> None:
    """Raise unless ``tiles`` has a number of one of ``dtypes`` for every tile of the weight."""
    least = part.tiles(block)
    if len(tiles.shape) != 2 or tiles.shape[0] < least[0] or tiles.shape[1] < least[1]:
        raise ShapeError(expected(f"at least {list(least)}", of=of, got=list(tiles.shape), do="pass one number per tile of the weight"))
    if tiles.dtype not in dtypes:
        raise DTypeError(expected(" or ".join(map(str, dtypes)), of=of, got=tiles.dtype, do="pass such a tensor"))


def check_fragment(out: TensorLike, size: int, of: str) -> None:
    """Raise unless ``out`` has ``size`` bytes."""
    if out.dtype.itemsize != 1:
        raise DTypeError(expected("uint8", of=of, got=out.dtype, do="pass the data of a quantized tensor"))
    if math.prod(out.shape) != size:
        raise ShapeError(expected(f"{size} bytes", of=of, got=math.prod(out.shape), do="pass those that the slice fills"))


def check_expansion(scale: TensorLike, output: TensorLike, tile_rows: int, tile_cols: int, rows_padded: int, block: Block, function: str) -> None:
    """Raise unless ``output`` is bytes that have a row for each row of the tiles of ``scale``."""
    if tuple(scale.shape) != (tile_rows, tile_cols):
        of, got = f"tile_rows and tile_cols, the tiles of the scales, of {function}", list(scale.shape)
        raise ShapeError(expected(f"[{tile_rows}, {tile_cols}]", of=of, got=got, do="pass one number per tile"))
    if output.dtype.itemsize != 1:
        raise DTypeError(expected("uint8", of=f"the expanded scales of {function}", got=output.dtype, do="pass the scales of an NVFP4 tensor"))
    rows, columns = tuple(output.shape) if len(output.shape) == 2 else (-1, -1)
    if rows != rows_padded or columns < tile_cols or rows <= (tile_rows - 1) * block[0]:
        wanted = f"[{rows_padded}, {tile_cols} or more] with a row for each row of {tile_rows} tiles"
        raise ShapeError(expected(wanted, of=f"rows_padded, the expanded scales, of {function}", got=list(output.shape), do="pad it"))
