"""Words for sums, copies and allocation."""

from __future__ import annotations

from collections.abc import Sequence

from fusible import tex
from fusible.nvte.casting import cast as _cast
from fusible.nvte.dtype import DType, Type, is_quantized_type
from fusible.nvte.tensor import Tensor

__all__ = ["add", "concatenate", "copy", "dbias", "empty", "empty_like", "multi_empty_share_metadata", "reshape", "split"]


def add(a: Tensor, b: Tensor, type: Type) -> Tensor:
    """``a + b`` in fp32, rounded once to ``type``; shapes broadcast (a bias ``[columns]`` onto ``[rows, columns]``)."""
    from_type = type if not is_quantized_type(type) else DType.Float32
    total = Tensor(tex.prim.add(a.data, b.data, from_type), from_type)
    return total if total.type == type else _cast(total, type)


def copy(x: Tensor) -> Tensor:
    """``x`` (unquantized) in memory of its own."""
    return Tensor(tex.prim.copy(x.data), x.type)


def dbias(dy: Tensor, type: DType) -> Tensor:
    """The gradient of a bias: ``[rows, columns] -> [columns]``, the sum over rows in fp32, rounded once to ``type``."""
    data = tex.dequantize(dy.data, DType.Float32) if is_quantized_type(dy.type) else dy.data
    return Tensor(tex.prim.row_sum(data, type), type)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """``x`` (unquantized) with another shape."""
    return Tensor(tex.prim.reshape(x.data, tuple(shape)), x.type)


def split(x: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """``x`` (unquantized) cut along ``dim``."""
    return [Tensor(piece, x.type) for piece in tex.prim.split(x.data, list(sizes), dim)]


def concatenate(xs: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors of one (unquantized) type side by side along ``dim``."""
    return Tensor(tex.prim.concatenate([x.data for x in xs], dim), xs[0].type)


def empty(shape: Sequence[int], type: Type, like: Tensor) -> Tensor:
    """A tensor of unspecified values, of the framework and device of ``like``."""
    if not is_quantized_type(type):
        return Tensor(tex.prim.empty(tuple(shape), type, _held(like)), type)
    return _cast(Tensor(tex.prim.full(tuple(shape), 0.0, DType.Float32, _held(like)), DType.Float32), type)


def empty_like(x: Tensor) -> Tensor:
    """A tensor of unspecified values with the shape and type of ``x``."""
    return empty(x.shape, x.type, x)


def multi_empty_share_metadata(*shapes: Sequence[int], type: Type, like: Tensor) -> list[Tensor]:
    """Empty tensors of one type: quantized ones share the slot of their scale, as the copies of one tensor do."""
    return [empty(shape, type, like) for shape in shapes]


def _held(x: Tensor) -> object:
    return getattr(x.data, "_scale_inv", x.data)


