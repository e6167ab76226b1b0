"""Functions for sums, products with a number, copies, the order of columns, and allocation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible import tex
from fusible.errors import DTypeError, ShapeError, expected
from fusible.nvte.casting import cast as _cast
from fusible.nvte.casting import dequantize
from fusible.nvte.dtype import DType, Type, is_quantized_type
from fusible.nvte.padding import is_padded, marked
from fusible.nvte.tensor import Tensor
from fusible.quantized.shapes import resolved
from fusible.tex.formats import WAYS
from fusible.tex.interface.domains import Count

__all__ = [
    "add",
    "concatenate",
    "copy",
    "dbias",
    "deinterleave",
    "empty",
    "empty_like",
    "interleave",
    "multi_empty_share_metadata",
    "permute",
    "reshape",
    "scale",
    "split",
    "zeros",
]


def add(a: Tensor, b: Tensor, type: Type) -> Tensor:
    """``a + b`` in fp32, rounded once to ``type``; shapes broadcast (a bias ``[columns]`` onto ``[rows, columns]``)."""
    from_type = type if not is_quantized_type(type) else DType.Float32
    total = Tensor(tex.prim.add(_values(a), _values(b), from_type), from_type)
    return total if total.type == type else _cast(total, type)


def scale(x: Tensor, factor: float, type: Type) -> Tensor:
    """``x * factor`` in fp32, rounded once to ``type``."""
    from_type = type if not is_quantized_type(type) else DType.Float32
    product = Tensor(tex.prim.scale(_values(x), factor, from_type), from_type)
    return product if product.type == type else _cast(product, type)


def copy(x: Tensor) -> Tensor:
    """``x`` (unquantized) in memory of its own."""
    return Tensor(tex.prim.copy(x.data), x.type)


def dbias(dy: Tensor, type: DType) -> Tensor:
    """The gradient of a bias: ``[rows, columns] -> [columns]``, the sum over rows in fp32, rounded once to ``type``."""
    return Tensor(tex.prim.row_sum(_values(dy), type), type)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """``x`` with another shape; a quantized one with another of the same last dimension."""
    storage, type_ = x.data, x.type
    if not is_quantized_type(type_):
        return Tensor(tex.prim.reshape(storage, tuple(shape)), type_)
    if is_padded(x):
        return marked(storage, type_, resolved(shape, x.shape))
    if (isinstance(type_, DType) or type_.per_tensor) and x.columnwise is None:  # bytes of any framework, and one scale
        return Tensor(storage.__class__(**{**storage.get_metadata(), "data": tex.prim.reshape(storage._data, tuple(shape))}), type_)
    return Tensor(storage.view(tuple(shape)), type_)


def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    """``x`` (unquantized) with its dimensions in the order ``dims``."""
    return Tensor(tex.prim.permute(x.data, tuple(dims)), x.type)


def interleave(x: Tensor, size: Count) -> Tensor:
    """The two halves of each row, cut into blocks of ``size`` columns, by turns: ``[a0 a1 .. b0 b1 ..]`` as ``[a0 b0 a1 b1 ..]``."""
    return _blocks_exchanged(x, 2, x.shape[-1] // (2 * size), size)


def deinterleave(x: Tensor, size: Count) -> Tensor:
    """The inverse of ``interleave``: ``[a0 b0 a1 b1 ..]`` as ``[a0 a1 .. b0 b1 ..]``."""
    return _blocks_exchanged(x, x.shape[-1] // (2 * size), 2, size)


def _blocks_exchanged(x: Tensor, outer: int, inner: int, size: int) -> Tensor:
    """Each row of ``x`` (unquantized), seen as ``[outer, inner, size]``, as ``[inner, outer, size]``."""
    *leading, width = x.shape
    if outer * inner * size != width:
        of = f"a tensor that is interleaved in blocks of {size}"
        raise ShapeError(expected(f"a multiple of {2 * size} columns", of=of, got=width, do="give whole blocks of both halves"))
    first = len(leading)
    blocks = tex.prim.reshape(x.data, (*leading, outer, inner, size))
    exchanged = tex.prim.permute(blocks, (*range(first), first + 1, first, first + 2))
    return Tensor(tex.prim.reshape(exchanged, x.shape), x.type)


def split(x: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """``x`` (unquantized) cut along ``dim``."""
    return [Tensor(piece, x.type) for piece in tex.prim.split(x.data, list(sizes), dim)]


def concatenate(xs: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors of one (unquantized) type side by side along ``dim``. Raises ``DTypeError`` for others."""
    types = {x.type for x in xs}
    if len(types) > 1 or any(map(is_quantized_type, types)):
        got, do = ", ".join(sorted(map(str, types))), "cast them to one type that is not quantized"
        raise DTypeError(expected("tensors of one type", of="xs of concatenate", got=got, do=do))
    return Tensor(tex.prim.concatenate([x.data for x in xs], dim), xs[0].type)


def empty(shape: Sequence[int], type: Type, like: Tensor) -> Tensor:
    """A tensor of unspecified values, of the framework and device of ``like``."""
    if not is_quantized_type(type):
        return Tensor(tex.prim.empty(tuple(shape), type, _data_of(like)), type)
    return _cast(Tensor(tex.prim.full(tuple(shape), 0.0, DType.Float32, _data_of(like)), DType.Float32), type)


def zeros(shape: Sequence[int], type: DType, like: Tensor) -> Tensor:
    """A tensor of zeros, of the framework and device of ``like``."""
    return Tensor(tex.prim.full(tuple(shape), 0.0, type, _data_of(like)), type)


def empty_like(x: Tensor) -> Tensor:
    """A tensor of unspecified values with the shape and type of ``x``."""
    return empty(x.shape, x.type, x)


def multi_empty_share_metadata(*shapes: Sequence[int], type: Type, like: Tensor) -> list[Tensor]:
    """Empty tensors of one type: quantized ones share the slot of their scale, as the copies of one tensor do."""
    return [empty(shape, type, like) for shape in shapes]


def _values(x: Tensor) -> Any:
    if is_padded(x):
        return dequantize(x, DType.Float32).data
    return tex.dequantize(x.data, DType.Float32) if is_quantized_type(x.type) else x.data


def _data_of(x: Tensor) -> object:
    """What ``x`` holds, or of a hybrid one a copy of it: of its framework and device."""
    copies = (getattr(x.data, f"{way}_sub_storage", None) for way in WAYS)
    data = next((copy for copy in copies if copy is not None), x.data)
    return getattr(data, "_scale_inv", data)
