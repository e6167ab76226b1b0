"""Tensors that are no whole blocks, in formats whose blocks must be whole, as MXFP8 and NVFP4.

Such a tensor is quantized with rows and columns of zeros behind its own, up to whole blocks, and its type remembers the shape without them
(``QuantizedType.logical``). A product takes the zeros along, which add nothing to it, and its result is cut. So it is what the padded tensors give,
on every backend; only a tensor that is handed on unquantized has no zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fusible import tex
from fusible.nvte.dtype import QuantizedType, Type
from fusible.nvte.frameworks import nvte_dtype
from fusible.nvte.tensor import Data, Tensor

__all__ = ["block_length", "block_of", "cut", "is_padded", "lacks_blocks", "marked", "pad", "pad_columns"]


def lacks_blocks(shape: Sequence[int], type: Type) -> bool:
    """Whether a tensor of ``shape`` has to be padded to be quantized to ``type``."""
    return isinstance(type, QuantizedType) and bool(shape) and not all([form.fits(shape) for form in type.block_formats])


def block_length(type: Type) -> int:
    """What rows and columns have to be multiples of to be quantized to a type: its elements per block, of a hybrid one those of both copies."""
    return math.lcm(*[form.length for form in type.block_formats if form.whole])  # type: ignore[union-attr]


def is_padded(x: Tensor) -> bool:
    """Whether ``x`` was quantized with zeros behind it."""
    type = x.type
    return type.__class__ is QuantizedType and bool(type.logical)  # type: ignore[union-attr]


def block_of(*xs: Tensor) -> int:
    """What the rows and columns of a product's operands are to be multiples of, so that those which are padded fit one another; 0 where none is."""
    return max([block_length(x.type) if is_padded(x) else 0 for x in xs])


def marked(data: Data, type: Type, shape: Sequence[int]) -> Tensor:
    """Wrap ``data`` that was quantized to ``type`` with zeros behind a tensor of ``shape``."""
    assert isinstance(type, QuantizedType)
    return Tensor(data, replace(type, logical=tuple(shape)))


def pad(data: Data, block: int) -> Data:
    """Unquantized ``data [*, columns]`` as a matrix with zeros behind its rows and its columns, of multiples of ``block``."""
    columns = data.shape[-1]
    rows = math.prod(data.shape[:-1])
    if len(data.shape) != 2:
        data = tex.prim.reshape(data, (rows, columns))
    if rows % block:
        data = tex.prim.concatenate([data, _zeros((-rows % block, columns), data)], 0)
    return pad_columns(data, block)


def pad_columns(data: Data, block: int) -> Data:
    """``data [*, columns]`` with zeros behind its columns."""
    columns = data.shape[-1]
    if columns % block == 0:
        return data
    return tex.prim.concatenate([data, _zeros((*data.shape[:-1], -columns % block), data)], len(data.shape) - 1)


def cut(data: Data, shape: Sequence[int]) -> Data:
    """The inverse of ``pad``: ``data [rows, columns]`` without what is behind a tensor of ``shape``."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    have_rows, have_columns = data.shape
    if have_rows > rows:
        data = tex.prim.split(data, [rows, have_rows - rows], 0)[0]
    if have_columns > columns:
        data = tex.prim.copy(tex.prim.split(data, [columns, have_columns - columns], 1)[0])
    return data if tuple(data.shape) == tuple(shape) else tex.prim.reshape(data, tuple(shape))


def _zeros(shape: Sequence[int], like: Data) -> Data:
    return tex.prim.full(tuple(shape), 0.0, nvte_dtype(like.dtype), like)
