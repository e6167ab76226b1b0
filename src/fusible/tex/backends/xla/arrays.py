"""The array functions of lazy tensors, as formulas ask for them."""

from __future__ import annotations

import operator

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla import fp8
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.formulas.arrays import Arrays

__all__ = ["LAZY", "fp32"]


def fp32(x: Tensor) -> Tensor:
    """``x`` in fp32."""
    return lazy.cast(x, lazy.float32)


def _halves(x: Tensor) -> tuple[Tensor, ...]:
    half = x.shape[-1] // 2
    return tuple(lazy.split(fp32(x), [half, half], -1))


def _clip(x: Tensor, least: float | None, largest: float | None) -> Tensor:
    x = x if largest is None else lazy.minimum(x, largest)
    return x if least is None else lazy.maximum(x, least)


def _filled(x: Tensor, condition: Tensor, value: float) -> Tensor:
    return lazy.where(condition, value, x)


def _put(old: Tensor, new: Tensor) -> Tensor:
    return old.assign_(new if new.dtype is old.dtype else lazy.cast(new, old.dtype))


def _repeated(grid: Tensor, count: int, dim: int) -> Tensor:
    inserted = lazy.unsqueeze(grid, dim + 1)
    shape = list(inserted.shape)
    shape[dim + 1] = count
    return lazy.reshape(lazy.broadcast_to(inserted, tuple(shape)), tuple(size * (count if d == dim else 1) for d, size in enumerate(grid.shape)))


LAZY = Arrays(
    fp8=fp8,
    float32=lazy.float32,
    dtype=to_lazy,
    accumulator=lambda dtype: lazy.float32,
    index=lazy.int32,
    cast=lazy.cast,
    wide=fp32,
    times=operator.mul,
    plus=operator.add,
    plus_product=lambda x, y, z: y * z + x,
    product_minus=lambda x, y, z: y * z - x,
    minus=operator.sub,
    minus_product=lambda x, y, z: x - y * z,
    over=operator.truediv,
    sqrt=lazy.sqrt,
    exp=lazy.exp,
    hidden=lambda x, visible, value: lazy.where(visible, x, value),
    plus_scaled_square=lambda x, y, factor: x + y * y * factor,
    plus_scaled=lambda x, y, factor: x + y * factor,
    minus_scaled=lambda x, y, factor: x - y * factor,
    maximum=lazy.maximum,
    bitcast=lazy.bitcast,
    shift_right=lazy.shift_right_logical,
    all_finite=lambda x: lazy.all(lazy.is_finite(x)),
    arange=lambda count, dtype, like: lazy.iota((count,), 0, dtype),
    full=lambda shape, value, dtype, like: lazy.full(tuple(shape), value, dtype),
    reshape=lambda x, shape: lazy.reshape(x, tuple(shape)),
    transpose=lambda x: lazy.transpose(x, 0, 1),
    permute=lazy.permute,
    concatenate=lambda xs, axis: lazy.concatenate(list(xs), axis),
    stack=lambda xs, axis: lazy.stack(list(xs), axis),
    split=lambda x, sizes, axis: lazy.split(x, list(sizes), axis),
    halves=_halves,
    sum=lazy.sum,
    mean=lambda x: lazy.mean(x, -1, keepdim=True),
    total=lambda x: lazy.sum(x, -1, keepdim=True),
    largest=lambda x: lazy.max(x, -1, keepdim=True),
    log=lazy.log,
    erfc=lazy.erfc,
    take=lambda x, places: lazy.gather(x, 0, places),
    where=lazy.where,
    fill=_filled,
    filled=_filled,
    clip=_clip,
    relu=lambda x: lazy.maximum(x, 0.0),
    abs=lazy.abs,
    tanh=lazy.tanh,
    sigmoid=lazy.sigmoid,
    rsqrt=lazy.rsqrt,
    softmax=lambda x: lazy.softmax(x, -1),
    masked=lambda x, mask: x * fp32(mask),
    sin=lazy.sin,
    cos=lazy.cos,
    contiguous=lambda x: x,
    copy=lambda x: Tensor.from_trace_tensor(x.trace_tensor),  # which may be made to stand for another value by itself
    unless=lambda noop, old, new: lazy.where(lazy.reshape(noop, ()) == 1, old, new),
    set_unless=lambda flag, condition: flag.assign_(lazy.where(condition, flag, lazy.ones(flag.shape, flag.dtype))),
    repeated=_repeated,
    put=_put,
)
