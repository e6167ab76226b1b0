"""Offsets of groups, on lazy tensors."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.errors import ShapeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.calls.layout import check_equal_lengths
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.interface.layout import Layout

__all__ = ["LayoutKernels"]


class LayoutKernels(Layout):
    def splits_to_offsets(self, first_dims: Tensor, logical_last_dim: int) -> Any:
        return _offsets(_ends(first_dims, "splits_to_offsets"), logical_last_dim, True, lazy.int64)

    @by_name
    def splits_to_offsets_multi(self, call: CallArguments) -> tuple[Any, list[Any]]:
        function = "splits_to_offsets_multi"
        check_equal_lengths(function, call.strides, call.include_leading_zero, call.dtypes)
        sizes = lazy.cast(call.split_sizes, lazy.int64)
        ends = _ends(sizes, function)
        return sizes, [_offsets(ends, *each[:2], to_lazy(each[2])) for each in zip(call.strides, call.include_leading_zero, call.dtypes, strict=True)]


def _ends(sizes: Tensor, function: str) -> Tensor:
    if sizes.ndim != 1:
        raise ShapeError(expected("one dimension", of=f"first_dims or split_sizes of {function}", got=list(sizes.shape), do="pass one per group"))
    return lazy.cumsum(lazy.cast(sizes, lazy.int64), 0)


def _offsets(ends: Tensor, stride: int, leading_zero: bool, dtype: lazy.dtype) -> Tensor:
    found = lazy.cast(ends * stride, dtype)
    return lazy.concatenate([lazy.zeros((1,), dtype), found], 0) if leading_zero else found
