"""Primitives beyond NVIDIA's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.backends.torch_backend.dropout import check_probability
from fusible.tex.backends.torch_backend.operands import flat, wide
from fusible.tex.backends.torch_backend.random import drop_threshold, words
from fusible.tex.interface.prim import Prim
from fusible.tex.protocol import accumulator, check_shape, to_torch

__all__ = ["PrimKernels"]


class PrimKernels(Prim):
    def prim_add(self, a: Any, b: Any, dtype: Any = None) -> Any:
        target = a.dtype if dtype is None else to_torch(dtype)
        if a.dtype is b.dtype is target:
            return torch.add(a, b)
        return torch.add(wide(a), b).to(target)

    def prim_scale(self, x: Any, factor: float, dtype: Any = None) -> Any:
        return torch.mul(wide(x), factor).to(x.dtype if dtype is None else to_torch(dtype))

    def prim_cast(self, x: Any, dtype: Any) -> Any:
        if x.is_complex():  # of which torch would drop the imaginary part
            raise DTypeError(expected("real numbers", of="x of cast", got=x.dtype, do="pass x.real"))
        return x.to(to_torch(dtype))

    def prim_copy(self, x: Any) -> Any:
        return x.clone(memory_format=torch.contiguous_format)

    def prim_transpose(self, x: Any) -> Any:
        if x.dim() != 2:
            raise ShapeError(expected("2 dimensions", of="the matrix of prim.transpose", got=list(x.shape), do="reshape it"))
        return x.t().contiguous()

    def prim_permute(self, x: Any, dims: Sequence[int]) -> Any:
        if sorted(dim % x.dim() if -x.dim() <= dim < x.dim() else dim for dim in dims) != list(range(x.dim())):
            raise ArgumentError(expected(f"each of {x.dim()} dimensions once", of="dims of prim.permute", got=list(dims), do="name them all"))
        return x.permute(*dims).contiguous()

    def prim_row_sum(self, x: Any, dtype: Any = None) -> Any:
        target = x.dtype if dtype is None else to_torch(dtype)
        return flat(x).sum(0, dtype=accumulator(x.dtype)).to(target)

    def prim_reshape(self, x: Any, shape: Sequence[int]) -> Any:
        return x.reshape(shape)

    def prim_empty(self, shape: Sequence[int], dtype: Any, like: Any) -> Any:
        return torch.empty(shape, dtype=to_torch(dtype), device=like.device)

    def prim_full(self, shape: Sequence[int], value: float, dtype: Any, like: Any) -> Any:
        return torch.full(shape, value, dtype=to_torch(dtype), device=like.device)

    def prim_concatenate(self, tensors: Sequence[Any], dim: int) -> Any:
        return torch.cat(tuple(tensors), dim)

    def prim_split(self, x: Any, sizes: Sequence[int], dim: int) -> list[Any]:
        return list(torch.split(x, list(sizes), dim))

    def prim_pad_groups(self, x: Any, sizes: Any, multiple: int) -> tuple[Any, Any]:
        rows, padded = x.shape[0], _rounded_up(sizes, multiple)
        _check_matrix(x, "pad_groups")
        _check_groups(sizes, rows, "pad_groups")
        total = -(-(rows + min(rows, sizes.numel()) * (multiple - 1)) // multiple) * multiple
        place, owned = _places(sizes, padded, rows)
        y = x.new_zeros((total + 1, *x.shape[1:]))  # the last row takes those of nobody
        return y.index_copy_(0, place.where(owned, total), x)[:total], padded.to(sizes.dtype)

    def prim_unpad_groups(self, x: Any, sizes: Any, multiple: int, rows: int) -> Any:
        _check_matrix(x, "unpad_groups")
        _check_groups(sizes, rows, "unpad_groups")
        if sizes.is_cpu:
            _check_groups(_rounded_up(sizes, multiple), x.shape[0], "unpad_groups")
        place, owned = _places(sizes, _rounded_up(sizes, multiple), rows)
        return x.index_select(0, place.where(owned, 0)).masked_fill_(~owned[:, None], 0)

    def prim_rope_angles(self, positions: int, width: int, base: float, like: Any) -> Any:
        if width % 2:
            raise ShapeError(expected("an even width", of="prim.rope_angles", got=width, do="pass the rotated width of a head"))
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / -width
        frequencies = torch.pow(torch.tensor(base, dtype=torch.float64), exponents)
        angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies).to(accumulator(like.dtype))
        return torch.cat((angles, angles), -1).view(positions, 1, 1, width).to(like.device)

    def prim_dropout(self, x: Any, probability: float, seed: Any, offset: int) -> tuple[Any, Any]:
        check_probability(probability, "prim.dropout")
        mask = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        first = offset << 40
        # In parts where it is large: a word takes many bytes to work out.
        for part in mask.view(-1).chunk(8 if x.numel() > 1 << 16 else 1):
            counter = torch.arange(first, first + part.numel(), dtype=torch.int64, device=x.device)
            part.copy_(words(seed, counter) >= drop_threshold(probability))
            first += part.numel()
        return _scaled(x, mask, probability), mask

    def prim_dropout_backward(self, dy: Any, mask: Any, probability: float) -> Any:
        check_probability(probability, "prim.dropout_backward")
        check_shape(mask, dy.shape, "mask of dropout_backward")
        return _scaled(dy, mask, probability)


def _rounded_up(sizes: torch.Tensor, multiple: int) -> torch.Tensor:
    return (sizes.long() + (multiple - 1)) // multiple * multiple


def _check_matrix(x: torch.Tensor, function: str) -> None:
    if x.dim() != 2:
        raise ShapeError(expected("[rows, columns]", of=f"x of {function}", got=list(x.shape), do="flatten the leading dimensions"))


def _check_groups(sizes: torch.Tensor, rows: int, function: str) -> None:
    """Raise ``ShapeError`` unless the groups are some of ``rows`` rows; reading their sizes on a device would wait for it."""
    numbers = sizes.tolist() if sizes.is_cpu else []
    if sum(numbers) > rows or min(numbers, default=0) < 0:
        raise ShapeError(expected(f"members within {rows} rows", of=f"sizes of {function}", got=numbers, do="divide the rows that there are"))


def _places(sizes: torch.Tensor, padded: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each of ``rows`` rows its place when its group has ``padded`` rows, and whether it has a group; int64 and bool ``[rows]``."""
    ends = sizes.long().cumsum(0)
    row = torch.arange(rows, device=sizes.device)
    group = torch.searchsorted(ends, row, right=True)
    owned, group = group < sizes.numel(), group.clamp_(max=sizes.numel() - 1)
    shift = (padded.cumsum(0) - padded) - (ends - sizes)
    return row + shift[group], owned


def _scaled(x: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    return (wide(x) * mask).mul_(1 / (1 - probability)).to(x.dtype)
