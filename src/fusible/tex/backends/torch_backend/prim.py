"""Primitives beyond NVIDIA's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.errors import DTypeError, ShapeError, expected
from fusible.tex.backends.torch_backend.kernels import TorchKernels
from fusible.tex.backends.torch_backend.operands import wide
from fusible.tex.backends.torch_backend.random import words
from fusible.tex.calls.seeds import drop_threshold
from fusible.tex.formulas.prim import PrimFormulas
from fusible.tex.interface.arguments import DTypeLike
from fusible.tex.interface.declare import CallArguments, inherited
from fusible.tex.interface.kernel_calls import Buffer, KernelCall, View, as_data, view_of
from fusible.tex.interface.specialize import SpecializedCall, specialized_by
from fusible.tex.protocol import accumulator, to_torch

__all__ = ["PrimKernels"]


def _views(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu and x.numel() > 0


def _part_of(x: Tensor, *views: Tensor) -> list[View] | None:
    """Each of ``views`` as a part of ``x``; None where one does not lie in its memory, as what was copied."""
    memory = x.untyped_storage().data_ptr()
    return [view_of(x, view) for view in views] if all(view.untyped_storage().data_ptr() == memory for view in views) else None


def _reshape_specialized(self: Any, call: CallArguments) -> SpecializedCall | None:
    x, shape = call.x, tuple(call.shape)
    found = _part_of(x, x.reshape(shape)) if _views(x) else None
    return None if found is None else SpecializedCall(lambda x: x.reshape(shape), *as_data((), found[0]))


def _split_specialized(self: Any, call: CallArguments) -> SpecializedCall | None:
    x, sizes, dim = call.x, list(call.sizes), call.dim
    found = _part_of(x, *x.split(sizes, dim)) if _views(x) else None
    return None if found is None else SpecializedCall(lambda x: list(x.split(sizes, dim)), *as_data((), found))


def _cast_specialized(self: Any, call: CallArguments) -> SpecializedCall | None:
    """Of what is of that dtype."""
    x = call.x
    return SpecializedCall(lambda x: x, *as_data((), x)) if _views(x) and x.dtype is to_torch(call.dtype) else None


_COPIED = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""What native kernels pass on, and so copy."""


def _copy_specialized(self: Any, call: CallArguments) -> SpecializedCall | None:
    x = call.x
    if not _views(x) or x.dtype not in _COPIED:
        return None
    y = Buffer(x.dtype, tuple(x.shape))
    copied = as_data([KernelCall("copy", {"src": x, "dst": y})], y)
    return SpecializedCall(lambda x: x.clone(memory_format=torch.contiguous_format), *copied)


class PrimKernels(TorchKernels, PrimFormulas):
    prim_reshape = specialized_by(_reshape_specialized)(inherited(PrimFormulas.prim_reshape))
    prim_split = specialized_by(_split_specialized)(inherited(PrimFormulas.prim_split))
    prim_copy = specialized_by(_copy_specialized)(inherited(PrimFormulas.prim_copy))

    def prim_add(self, a: Tensor, b: Tensor, dtype: DTypeLike | None = None) -> Any:
        target = a.dtype if dtype is None else to_torch(dtype)
        if a.dtype is b.dtype is target:
            return torch.add(a, b)
        return torch.add(wide(a), b).to(target)

    @specialized_by(_cast_specialized)
    def prim_cast(self, x: Tensor, dtype: DTypeLike) -> Any:
        if x.is_complex():  # of which torch would drop the imaginary part
            raise DTypeError(expected("real numbers", of="x of cast", got=x.dtype, do="pass x.real"))
        return x.to(to_torch(dtype))

    def prim_empty(self, shape: Sequence[int], dtype: DTypeLike, like: Tensor) -> Any:
        return torch.empty(shape, dtype=to_torch(dtype), device=like.device)

    def _angle_table(self, positions: int, width: int, base: float, like: Tensor, factors: Sequence[float]) -> Tensor:
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / -width
        frequencies = torch.pow(torch.tensor(base, dtype=torch.float64, device="cpu"), exponents)
        if factors:
            frequencies *= torch.tensor(factors, dtype=torch.float64, device="cpu")
        angles = torch.outer(torch.arange(positions, dtype=torch.float64, device="cpu"), frequencies).to(accumulator(like.dtype))
        return torch.cat((angles, angles), -1).view(positions, 1, 1, width).to(like.device)

    def _drawn_mask(self, x: Tensor, probability: float, seed: Tensor, offset: int) -> Tensor:
        mask = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        first = offset << 40
        # In parts where it is large: a word takes many bytes to work out.
        for part in mask.view(-1).chunk(8 if x.numel() > 1 << 16 else 1):
            counter = torch.arange(first, first + part.numel(), dtype=torch.int64, device=x.device)
            part.copy_(words(seed, counter) >= drop_threshold(probability))
            first += part.numel()
        return mask

    def prim_take_along(self, x: Tensor, indices: Tensor) -> Any:
        inside = (indices >= 0) & (indices < x.shape[1])
        return x.gather(1, indices.long().masked_fill(~inside, 0)).masked_fill_(~inside, 0) if x.shape[1] else x.new_zeros(indices.shape)

    def prim_put_along(self, y: Tensor, indices: Tensor, columns: int) -> Any:
        places = indices.long().clamp(max=columns).masked_fill(indices < 0, columns)  # the last column takes what has none
        whole = wide(y).new_zeros((y.shape[0], columns + 1)).scatter_add_(1, places, wide(y))
        return whole[:, :columns].to(y.dtype, memory_format=torch.contiguous_format)

    def prim_pad_groups(self, x: Tensor, sizes: Tensor, multiple: int) -> tuple[Any, Any]:
        rows, padded = x.shape[0], _rounded_up(sizes, multiple)
        _check_matrix(x, "pad_groups")
        _check_groups(sizes, rows, "pad_groups")
        total = -(-(rows + min(rows, sizes.numel()) * (multiple - 1)) // multiple) * multiple
        place, owned = _places(sizes, padded, rows)
        y = x.new_zeros((total + 1, *x.shape[1:]))  # the last row takes those of nobody
        return y.index_copy_(0, place.where(owned, total), x)[:total], padded.to(sizes.dtype)

    def prim_unpad_groups(self, x: Tensor, sizes: Tensor, multiple: int, rows: int) -> Any:
        _check_matrix(x, "unpad_groups")
        _check_groups(sizes, rows, "unpad_groups")
        if sizes.is_cpu:
            _check_groups(_rounded_up(sizes, multiple), x.shape[0], "unpad_groups")
        place, owned = _places(sizes, _rounded_up(sizes, multiple), rows)
        return x.index_select(0, place.where(owned, 0)).masked_fill_(~owned[:, None], 0)


def _rounded_up(sizes: Tensor, multiple: int) -> Tensor:
    return (sizes.long() + (multiple - 1)) // multiple * multiple


def _check_matrix(x: Tensor, function: str) -> None:
    if x.dim() != 2:
        raise ShapeError(expected("[rows, columns]", of=f"x of {function}", got=list(x.shape), do="flatten the leading dimensions"))


def _check_groups(sizes: Tensor, rows: int, function: str) -> None:
    """Raise ``ShapeError`` unless the groups are some of ``rows`` rows; reading their sizes on a device would wait for it."""
    numbers = sizes.tolist() if sizes.is_cpu else []
    if sum(numbers) > rows or min(numbers, default=0) < 0:
        raise ShapeError(expected(f"members within {rows} rows", of=f"sizes of {function}", got=numbers, do="divide the rows that there are"))


def _places(sizes: Tensor, padded: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Of each of ``rows`` rows its place when its group has ``padded`` rows, and whether it has a group; int64 and bool ``[rows]``."""
    ends = sizes.long().cumsum(0)
    row = torch.arange(rows, device=sizes.device)
    group = torch.searchsorted(ends, row, right=True)
    owned, group = group < sizes.numel(), group.clamp_(max=sizes.numel() - 1)
    shift = (padded.cumsum(0) - padded) - (ends - sizes)
    return row + shift[group], owned
