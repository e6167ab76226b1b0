"""Transposes of FP8 bytes, of packed FP4 codes and of their scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.errors import ShapeError, expected
from fusible.tex.backends.torch_backend.fp8 import transpose_bytes
from fusible.tex.backends.torch_backend.number_formats import pack_nibbles, unpack_nibbles
from fusible.tex.interface.transpose import Transpose
from fusible.tex.layout_call import check_equal_lengths, check_same_dtype
from fusible.tex.protocol import check_bytes, check_shape, outer, transposed_shape

__all__ = ["TransposeKernels"]

_TILE = 16


class TransposeKernels(Transpose):
    def fp8_transpose(self, input: Any, dtype: Any, *, out: Any) -> Any:
        check_bytes(input, "fp8_transpose")
        if out is None:
            return transpose_bytes(input)
        check_shape(out, transposed_shape(input.shape), "out of fp8_transpose")
        return out.copy_(input.movedim(-1, 0))

    def nvfp4_data_transpose(self, input: Any, *, out: Any) -> Any:
        _check_codes(input, out, "nvfp4_data_transpose")
        codes = _transposed_codes(input)
        return codes if out is None else out.copy_(codes)

    def nvfp4_2d_scale_transpose(self, input: Any, output: Any, M_tiles: int, K_tiles: int) -> None:
        _check_scales(input, output, M_tiles, K_tiles, "nvfp4_2d_scale_transpose")
        _transpose_scales(input, output, M_tiles, K_tiles)

    def nvfp4_2d_multi_tensor_transpose(
        self,
        rowwise_data_list: Sequence[Any],
        columnwise_data_list: Sequence[Any],
        rowwise_scale_inv_list: Sequence[Any],
        columnwise_scale_inv_list: Sequence[Any],
        M_list: Sequence[int],
        K_list: Sequence[int],
    ) -> None:
        function = "nvfp4_2d_multi_tensor_transpose"
        lists = (rowwise_data_list, columnwise_data_list, rowwise_scale_inv_list, columnwise_scale_inv_list, M_list, K_list)
        check_equal_lengths(function, *lists)
        weights = [(*each, -(-rows // _TILE), -(-columns // _TILE)) for *each, rows, columns in zip(*lists, strict=True)]
        for (data, columnwise, scale, columnwise_scale, down, across), rows, columns in zip(weights, M_list, K_list, strict=True):
            if (outer(data.shape), 2 * data.shape[-1]) != (rows, columns):
                got = list(data.shape)
                raise ShapeError(expected(f"[{rows}, {columns} / 2]", of=f"rowwise data of {function}", got=got, do="pass the weight's own M and K"))
            _check_codes(data, columnwise, function)
            _check_scales(scale, columnwise_scale, down, across, function)
        for data, columnwise, scale, columnwise_scale, down, across in weights:
            columnwise.copy_(_transposed_codes(data))
            _transpose_scales(scale, columnwise_scale, down, across)

    def swap_first_dims(self, tensor: Any, *, out: Any) -> Any:
        if tensor.dim() < 2:
            raise ShapeError(expected("at least two dimensions", of="swap_first_dims", got=list(tensor.shape), do="reshape it"))
        swapped = tensor.transpose(0, 1)
        if out is None:
            return swapped.contiguous()
        check_shape(out, swapped.shape, "out of swap_first_dims")
        check_same_dtype(out, tensor, "out of swap_first_dims")
        return out.copy_(swapped)


def _check_codes(data: Tensor, out: Tensor | None, function: str) -> None:
    check_bytes(data, function)
    rows, columns = outer(data.shape), 2 * data.shape[-1]
    if rows % 2:
        raise ShapeError(expected("an even number of rows", of=f"the data of {function}", got=rows, do="pad them, as two elements share a byte"))
    if out is not None:
        check_bytes(out, function)
        check_shape(out, (columns, rows // 2), f"the transposed data of {function}")


def _transposed_codes(data: Tensor) -> Tensor:
    codes = unpack_nibbles(data.view(torch.uint8).reshape(outer(data.shape), data.shape[-1]))
    return pack_nibbles(codes.t().contiguous())


def _check_scales(scale: Tensor, out: Tensor, down: int, across: int, function: str) -> None:
    sizes = (scale, (down, across), "row-wise"), (out, (across, down), "column-wise")
    for x, (rows, columns), name in sizes:
        check_bytes(x, function)
        least = (max(_TILE * rows - _TILE + 1, 0), columns)
        if x.dim() != 2 or x.shape[0] < least[0] or x.shape[1] < least[1]:
            got = list(x.shape)
            raise ShapeError(expected(f"at least {list(least)}", of=f"the {name} scales of {function}", got=got, do="pad them as NVFP4 does"))


def _transpose_scales(scale: Tensor, out: Tensor, down: int, across: int) -> None:
    tiles = scale[: _TILE * down : _TILE, :across].t()
    filled = min(_TILE * across, out.shape[0])
    out[:filled, :down].copy_(tiles.repeat_interleave(_TILE, 0)[:filled])
    out[filled:].zero_()
    out[:, down:].zero_()
