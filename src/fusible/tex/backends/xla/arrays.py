"""The array functions of lazy tensors, as formulas ask for them."""

from __future__ import annotations

import operator

from fusible import lazy
from fusible.lazy import Tensor
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


def _put(old: Tensor, new: Tensor) -> Tensor:
    return old.assign_(new if new.dtype is old.dtype else lazy.cast(new, old.dtype))


def _itself(x: Tensor) -> Tensor:
    return x


LAZY = Arrays(
    float32=lazy.float32,
    dtype=to_lazy,
    cast=lazy.cast,
    wide=fp32,
    times=operator.mul,
    plus=operator.add,
    plus_product=lambda x, y, z: y * z + x,
    product_minus=lambda x, y, z: y * z - x,
    reshape=lambda x, shape: lazy.reshape(x, tuple(shape)),
    transpose=lambda x: lazy.transpose(x, 0, 1),
    concatenate=lambda xs, axis: lazy.concatenate(list(xs), axis),
    stack=lambda xs, axis: lazy.stack(list(xs), axis),
    split=lambda x, sizes, axis: lazy.split(x, list(sizes), axis),
    halves=_halves,
    sum=lazy.sum,
    mean=lambda x: lazy.mean(x, -1, keepdim=True),
    where=lazy.where,
    clip=_clip,
    relu=lambda x: lazy.maximum(x, 0.0),
    abs=lazy.abs,
    tanh=lazy.tanh,
    sigmoid=lazy.sigmoid,
    rsqrt=lazy.rsqrt,
    sin=lazy.sin,
    cos=lazy.cos,
    contiguous=_itself,
    copy=_itself,
    unless=lambda noop, old, new: lazy.where(lazy.reshape(noop, ()) == 1, old, new),
    put=_put,
)
