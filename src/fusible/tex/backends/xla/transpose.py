"""Transposes of FP8 bytes, of packed FP4 codes and of their scales."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.errors import ShapeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.blocks import padded
from fusible.tex.backends.xla.fp8 import transpose_bytes
from fusible.tex.backends.xla.number_formats import pack_nibbles, unpack_nibbles
from fusible.tex.backends.xla.operands import flat
from fusible.tex.calls.layout import check_same_dtype
from fusible.tex.calls.transpose import TILE, check_codes, check_scales, checked_weights
from fusible.tex.interface.declare import by_name
from fusible.tex.interface.transpose import Transpose
from fusible.tex.protocol import check_bytes, check_shape, transposed_shape

__all__ = ["TransposeKernels"]


class TransposeKernels(Transpose):
    def fp8_transpose(self, input: Any, dtype: Any, *, out: Any = None) -> Any:
        check_bytes(input, "input of fp8_transpose")
        if out is None:
            return transpose_bytes(input)
        check_shape(out, transposed_shape(input.shape), "out of fp8_transpose")
        return out.assign_(transpose_bytes(input))

    def nvfp4_data_transpose(self, input: Any, *, out: Any) -> Any:
        check_codes(input, out, "nvfp4_data_transpose")
        codes = _transposed_codes(input)
        return codes if out is None else out.assign_(codes)

    def nvfp4_2d_scale_transpose(self, input: Any, output: Any, M_tiles: int, K_tiles: int) -> None:
        check_scales(input, output, M_tiles, K_tiles, "nvfp4_2d_scale_transpose")
        _transpose_scales(input, output, M_tiles, K_tiles)

    @by_name
    def nvfp4_2d_multi_tensor_transpose(self, call: Any) -> None:
        for data, columnwise, scale, columnwise_scale, down, across in checked_weights(call):
            columnwise.assign_(_transposed_codes(data))
            _transpose_scales(scale, columnwise_scale, down, across)

    def swap_first_dims(self, tensor: Any, *, out: Any) -> Any:
        if tensor.ndim < 2:
            raise ShapeError(expected("at least two dimensions", of="tensor of swap_first_dims", got=list(tensor.shape), do="reshape it"))
        swapped = lazy.transpose(tensor, 0, 1)
        if out is None:
            return swapped
        check_shape(out, swapped.shape, "out of swap_first_dims")
        check_same_dtype(out, tensor, "out of swap_first_dims")
        return out.assign_(swapped)


def _transposed_codes(data: Tensor) -> Tensor:
    return pack_nibbles(lazy.transpose(unpack_nibbles(flat(data)), 0, 1))


def _transpose_scales(scale: Tensor, out: Tensor, down: int, across: int) -> None:
    tiles = lazy.transpose(scale[: TILE * down : TILE, :across], 0, 1)
    filled = lazy.reshape(lazy.broadcast_to(tiles[:, None], (across, TILE, down)), (across * TILE, down))
    out.assign_(padded(filled[: out.shape[0]], out.shape))
