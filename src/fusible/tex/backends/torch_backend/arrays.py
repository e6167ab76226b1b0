"""torch's array functions, as formulas ask for them."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend import fp8
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.formulas.arrays import Arrays
from fusible.tex.protocol import accumulator, to_torch

__all__ = ["TORCH", "wide"]


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype that the reference computes in (``accumulator``); itself where it is of that."""
    return x if x.dtype is torch.float64 else x.float()


def _put(old: Tensor, new: Tensor) -> Tensor:
    with writing(old):
        return old.copy_(new)


TORCH = Arrays(
    fp8=fp8,
    float32=torch.float32,
    dtype=to_torch,
    accumulator=accumulator,
    index=torch.int64,
    cast=lambda x, dtype: x if x.dtype is dtype else x.to(dtype),
    wide=wide,
    times=Tensor.mul_,
    plus=Tensor.add_,
    plus_product=Tensor.addcmul_,
    product_minus=lambda x, y, z: x.neg_().addcmul_(y, z),
    minus=Tensor.sub_,
    minus_product=lambda x, y, z: x.addcmul_(y, z, value=-1),
    over=Tensor.div_,
    sqrt=Tensor.sqrt_,
    exp=Tensor.exp_,
    hidden=lambda x, visible, value: x.masked_fill_(visible.logical_not_(), value),
    plus_scaled_square=lambda x, y, factor: x.addcmul_(y, y, value=factor),
    plus_scaled=lambda x, y, factor: torch.add(x, y, alpha=factor),
    minus_scaled=lambda x, y, factor: x - y * factor if isinstance(factor, Tensor) else torch.sub(x, y, alpha=factor),
    maximum=torch.maximum,
    bitcast=Tensor.view,
    shift_right=Tensor.bitwise_right_shift,
    all_finite=lambda x: x.isfinite().all(),
    arange=lambda count, dtype, like: torch.arange(count, dtype=dtype, device=like.device),
    full=lambda shape, value, dtype, like: torch.full(shape, value, dtype=dtype, device=like.device),
    reshape=lambda x, shape: x.reshape(tuple(shape)),
    transpose=lambda x: x.t().contiguous(),
    permute=lambda x, dims: x.permute(*dims),
    concatenate=lambda xs, axis: torch.cat(tuple(xs), axis),
    stack=lambda xs, axis: torch.stack(tuple(xs), axis),
    split=lambda x, sizes, axis: torch.split(x, list(sizes), axis),
    halves=lambda x: tuple(map(wide, torch.tensor_split(x, 2, -1))),
    sum=Tensor.sum,
    mean=lambda x: x.mean(-1, keepdim=True),
    total=lambda x: x.sum(-1, keepdim=True),
    largest=lambda x: x.amax(-1, keepdim=True),
    log=torch.log,
    erfc=torch.erfc,
    take=lambda x, places: x[places],
    where=torch.where,
    fill=Tensor.masked_fill_,
    filled=Tensor.masked_fill,
    clip=torch.clamp,
    relu=torch.relu,
    abs=torch.abs,
    tanh=torch.tanh,
    sigmoid=torch.sigmoid,
    rsqrt=torch.rsqrt,
    softmax=lambda x: torch.softmax(x, -1),
    masked=torch.mul,
    sin=torch.sin,
    cos=torch.cos,
    contiguous=Tensor.contiguous,
    copy=lambda x: x.clone(memory_format=torch.contiguous_format),
    unless=lambda noop, old, new: torch.where(noop == 1, old, new),
    set_unless=lambda flag, condition: flag.masked_fill_(~condition, 1),
    repeated=Tensor.repeat_interleave,
    put=_put,
)
