"""torch's array functions, as formulas ask for them."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.tex.calls.inference_tensors import writing
from fusible.tex.formulas.arrays import Arrays
from fusible.tex.protocol import to_torch

__all__ = ["TORCH", "wide"]


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype that the reference computes in (``accumulator``); itself where it is of that."""
    return x if x.dtype is torch.float32 or x.dtype is torch.float64 else x.float()


def _put(old: Tensor, new: Tensor) -> Tensor:
    with writing(old):
        return old.copy_(new)


TORCH = Arrays(
    float32=torch.float32,
    dtype=to_torch,
    cast=lambda x, dtype: x if x.dtype is dtype else x.to(dtype),
    wide=wide,
    times=Tensor.mul_,
    plus=Tensor.add_,
    plus_product=Tensor.addcmul_,
    product_minus=lambda x, y, z: x.neg_().addcmul_(y, z),
    reshape=lambda x, shape: x.reshape(tuple(shape)),
    transpose=lambda x: x.t().contiguous(),
    concatenate=lambda xs, axis: torch.cat(tuple(xs), axis),
    stack=lambda xs, axis: torch.stack(tuple(xs), axis),
    split=lambda x, sizes, axis: torch.split(x, list(sizes), axis),
    halves=lambda x: tuple(map(wide, torch.tensor_split(x, 2, -1))),
    sum=Tensor.sum,
    mean=lambda x: x.mean(-1, keepdim=True),
    where=torch.where,
    clip=torch.clamp,
    relu=torch.relu,
    abs=torch.abs,
    tanh=torch.tanh,
    sigmoid=torch.sigmoid,
    rsqrt=torch.rsqrt,
    sin=torch.sin,
    cos=torch.cos,
    contiguous=Tensor.contiguous,
    copy=lambda x: x.clone(memory_format=torch.contiguous_format),
    unless=lambda noop, old, new: torch.where(noop == 1, old, new),
    put=_put,
)
