"""Transposes of FP8 bytes, of packed FP4 codes and of their scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.errors import ShapeError, expected
from fusible.tex.backends.torch_backend.number_formats import pack_nibbles, unpack_nibbles
from fusible.tex.calls.layout import check_apart, check_same_dtype
from fusible.tex.calls.transpose import TILE, check_codes, check_scales, checked_weights
from fusible.tex.interface.declare import by_name
from fusible.tex.interface.transpose import Transpose
from fusible.tex.protocol import check_bytes, check_shape, outer, transposed_shape

__all__ = ["TransposeKernels"]


class TransposeKernels(Transpose):
    def fp8_transpose(self, input: Any, dtype: Any, *, out: Any) -> Any:
        check_bytes(input, "input of fp8_transpose")
        if out is None:
            return input.movedim(-1, 0).clone(memory_format=torch.contiguous_format)  # new memory, of one dimension too
        check_bytes(out, "out of fp8_transpose")
        check_shape(out, transposed_shape(input.shape), "out of fp8_transpose")
        check_apart(out, [input], "out of fp8_transpose")
        return out.copy_(input.movedim(-1, 0))

    def nvfp4_data_transpose(self, input: Any, *, out: Any) -> Any:
        check_codes(input, out, "nvfp4_data_transpose")
        codes = _transposed_codes(input)
        return codes if out is None else out.copy_(codes)

    def nvfp4_2d_scale_transpose(self, input: Any, output: Any, M_tiles: int, K_tiles: int) -> None:
        check_scales(input, output, M_tiles, K_tiles, "nvfp4_2d_scale_transpose")
        check_apart(output, [input], "output of nvfp4_2d_scale_transpose")
        _transpose_scales(input, output, M_tiles, K_tiles)

    @by_name
    def nvfp4_2d_multi_tensor_transpose(self, call: Any) -> None:
        for data, columnwise, scale, columnwise_scale, down, across in checked_weights(call):
            columnwise.copy_(_transposed_codes(data))
            _transpose_scales(scale, columnwise_scale, down, across)

    def swap_first_dims(self, tensor: Any, *, out: Any) -> Any:
        if tensor.dim() < 2:
            raise ShapeError(expected("at least two dimensions", of="tensor of swap_first_dims", got=list(tensor.shape), do="reshape it"))
        swapped = tensor.transpose(0, 1)
        if out is None:
            return swapped.contiguous()
        check_shape(out, swapped.shape, "out of swap_first_dims")
        check_same_dtype(out, tensor, "out of swap_first_dims")
        check_apart(out, [tensor], "out of swap_first_dims")
        return out.copy_(swapped)


def _transposed_codes(data: Tensor) -> Tensor:
    codes = unpack_nibbles(data.view(torch.uint8).reshape(outer(data.shape), data.shape[-1]))
    return pack_nibbles(codes.t().contiguous())


def _transpose_scales(scale: Tensor, out: Tensor, down: int, across: int) -> None:
    tiles = scale[: TILE * down : TILE, :across].t()
    filled = min(TILE * across, out.shape[0])
    out[:filled, :down].copy_(tiles.repeat_interleave(TILE, 0)[:filled])
    out[filled:].zero_()
    out[:, down:].zero_()
