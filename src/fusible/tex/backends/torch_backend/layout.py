"""Movements, paddings and allocations of plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.tex.calls.index_checks import check_counts_fit
from fusible.tex.calls.layout import check_disjoint, check_each, check_equal_lengths, check_same_dtype, check_segments, check_wider
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.interface.domains import is_flag
from fusible.tex.interface.layout import Layout
from fusible.tex.protocol import to_torch

__all__ = ["LayoutKernels", "addresses", "allocate_together"]

_ALIGNMENT = 16
_LARGEST_ALIGNMENT = 1 << 30
_TO_BHSD = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}


class LayoutKernels(Layout):
    def fused_multi_row_padding(self, input: Tensor, output: Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]) -> None:
        check_segments(input, output, input_row_list, padded_input_row_list, "fused_multi_row_padding")
        check_same_dtype(output, input, "output of fused_multi_row_padding")
        check_disjoint(output, [input], "output of fused_multi_row_padding")
        for rows, padded in zip(input.split(list(input_row_list)), output.split(list(padded_input_row_list)), strict=True):
            if rows.shape[0]:
                padded[: rows.shape[0]].copy_(rows)
                padded[rows.shape[0] :].zero_()

    def fused_multi_row_unpadding(self, input: Tensor, output: Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]) -> None:
        check_segments(output, input, unpadded_input_row_list, input_row_list, "fused_multi_row_unpadding")
        check_same_dtype(output, input, "output of fused_multi_row_unpadding")
        check_disjoint(output, [input], "output of fused_multi_row_unpadding")
        for padded, rows in zip(input.split(list(input_row_list)), output.split(list(unpadded_input_row_list)), strict=True):
            rows.copy_(padded[: rows.shape[0]])

    def bulk_allocate(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any], device: Any = None, alignments: Sequence[int] | None = None
    ) -> list[Any]:
        if alignments is None:
            alignments = [_ALIGNMENT] * len(shapes)
        check_equal_lengths("bulk_allocate", shapes, dtypes, alignments)
        return allocate_together(shapes, [to_torch(dtype) for dtype in dtypes], device, alignments)

    def copy_data_ptrs_to_device(self, tensors: Sequence[Any], device: Any) -> Any:
        return addresses(tensors, device)

    def splits_to_offsets(self, first_dims: Tensor, logical_last_dim: int) -> Any:
        check_counts_fit(first_dims, [logical_last_dim], [torch.iinfo(torch.int64).max], "first_dims of splits_to_offsets")
        ends = _ends(first_dims, "splits_to_offsets")
        return _offsets(ends, logical_last_dim, ends.new_empty(ends.numel() + 1))

    @by_name
    def splits_to_offsets_multi(self, call: CallArguments) -> tuple[Any, list[Any]]:
        function = "splits_to_offsets_multi"
        check_equal_lengths(function, call.strides, call.include_leading_zero, call.dtypes)
        check_each(call.include_leading_zero, is_flag, "a bool", f"include_leading_zero of {function}")
        sizes = call.split_sizes.to(device=call.device, dtype=torch.int64)
        ends = _ends(sizes, function)
        types = [to_torch(dtype) for dtype in call.dtypes]
        check_counts_fit(call.split_sizes, call.strides, [_most(dtype) for dtype in types], f"split_sizes of {function}")
        shapes = [[ends.numel() + bool(zero)] for zero in call.include_leading_zero]
        if call.bulk_allocate:
            outputs = allocate_together(shapes, types, ends.device, [_ALIGNMENT] * len(types))
        else:
            outputs = [torch.empty(shape, dtype=dtype, device=ends.device) for shape, dtype in zip(shapes, types, strict=True)]
        return sizes, [_offsets(ends, stride, out) for stride, out in zip(call.strides, outputs, strict=True)]

    def multi_tensor_transpose_to_bhsd(
        self,
        inputs: Sequence[Any | None],
        original_format: str,
        outputs: Sequence[Any | None] = [],
    ) -> list[Any | None]:
        function = "multi_tensor_transpose_to_bhsd"
        if original_format not in _TO_BHSD:
            of, got = f"original_format of {function}", repr(original_format)
            raise ArgumentError(expected("'sbhd' or 'bshd'", of=of, got=got, do="pass one of the two"))
        views = [_heads_first(x, original_format, function) for x in inputs]
        outs = outputs or [None] * len(inputs)
        check_equal_lengths(f"inputs and outputs of {function}", inputs, outs)
        check_each(outs, lambda x: x is None or isinstance(x, Tensor), "a tensor or None", f"outputs of {function}")
        for view, out in zip(views, outs, strict=True):
            if view is not None and out is not None:
                check_wider(out, view, f"outputs of {function}")
        return [None if view is None else _padded(view, out) for view, out in zip(views, outs, strict=True)]

    def multi_tensor_pad_last_dim(self, inputs: Sequence[Any], alignment: int) -> list[Any]:
        if alignment < 1:
            raise ArgumentError(expected("at least 1", of="alignment of multi_tensor_pad_last_dim", got=alignment, do="pass a width"))
        widths = [-(-x.shape[-1] // alignment) * alignment for x in inputs]
        return [x if x.shape[-1] == width else _padded(x, x.new_empty((*x.shape[:-1], width))) for x, width in zip(inputs, widths, strict=True)]


def addresses(tensors: Sequence[Tensor], device: torch.device | str) -> Tensor:
    """Where the data of each tensor is, int64 ``[n]`` on ``device``."""
    return torch.tensor([x.data_ptr() for x in tensors], dtype=torch.int64, device="cpu").to(device)


def allocate_together(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device: Any, alignments: Sequence[int]) -> list[Tensor]:
    """Empty tensors that share one allocation, each at a multiple of its alignment.

    They are no views of one another: a write to one is no change of another as autograd counts changes.
    """
    starts, end = [], 0
    for shape, dtype, alignment in zip(shapes, dtypes, alignments, strict=True):
        if not dtype.itemsize <= alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
            wanted = f"a power of two from {dtype.itemsize} to {_LARGEST_ALIGNMENT}"
            raise ArgumentError(expected(wanted, of="an alignment of bulk_allocate", got=alignment, do="pass such a number of bytes"))
        starts.append(-(-end // alignment) * alignment)
        end = starts[-1] + math.prod(shape) * dtype.itemsize
    # Allocators align to 64 bytes and more: only beyond that must room be left to move the first address.
    largest = max(alignments, default=1)
    buffer = torch.empty(end + (largest if largest > 64 else 0), dtype=torch.uint8, device=device)
    first = -buffer.data_ptr() % largest
    storage = buffer.untyped_storage()
    return [
        torch.empty(0, dtype=dtype, device=buffer.device).set_(storage, (first + start) // dtype.itemsize, tuple(shape))  # pyright: ignore
        for shape, dtype, start in zip(shapes, dtypes, starts, strict=True)
    ]


def _most(dtype: torch.dtype) -> int:
    """The largest number up to which ``dtype`` holds every offset."""
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def _ends(sizes: Tensor, function: str) -> Tensor:
    if sizes.dim() != 1:
        raise ShapeError(expected("one dimension", of=f"first_dims or split_sizes of {function}", got=list(sizes.shape), do="pass one per split"))
    return sizes.cumsum(0, dtype=torch.int64)


def _offsets(ends: Tensor, stride: int, out: Tensor) -> Tensor:
    zeros = out.numel() - ends.numel()
    out[:zeros].zero_()
    torch.mul(ends, stride, out=out[zeros:])
    return out


def _heads_first(x: Tensor | None, original_format: str, function: str) -> Tensor | None:
    if x is not None and x.dim() != 4:
        raise ShapeError(expected("4 dimensions", of=f"inputs of {function}", got=list(x.shape), do="reshape it"))
    return None if x is None else x.permute(_TO_BHSD[original_format])


def _padded(x: Tensor, out: Tensor | None) -> Tensor:
    """``x``, contiguous, or in ``out`` with zeros beyond its columns."""
    if out is None:
        return x.contiguous()
    out[..., : x.shape[-1]].copy_(x)
    out[..., x.shape[-1] :].zero_()
    return out
