"""Transposes of FP8 bytes, of packed FP4 codes and of their scales."""

from __future__ import annotations

from typing import Any

from fusible.errors import ShapeError, expected
from fusible.tex.calls.layout import check_disjoint, check_same_dtype
from fusible.tex.calls.transpose import check_codes, check_scales, checked_weights
from fusible.tex.formulas.arrays import Array, ArrayKernels
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.interface.transpose import Transpose
from fusible.tex.protocol import check_bytes, check_shape, transposed_shape

__all__ = ["TransposeFormulas"]


class TransposeFormulas(ArrayKernels, Transpose):
    """A backend has the transposes; those of bytes and of first dimensions may be views."""

    def _bytes_transposed(self, data: Array) -> Any:
        """``[*leading, last] -> [last, *leading]``."""
        raise NotImplementedError

    def _codes_transposed(self, data: Array) -> Any:
        """The transpose of a matrix of codes. Both are packed two codes to a byte along the last dimension."""
        raise NotImplementedError

    def _first_swapped(self, x: Array) -> Any:
        """``[a, b, *] -> [b, a, *]``."""
        raise NotImplementedError

    def _transpose_scales(self, scale: Array, out: Array, down: int, across: int) -> None:
        """Write the scales of ``down`` by ``across`` tiles, one for each line of a tile, transposed, and zeros beside them."""
        raise NotImplementedError

    def fp8_transpose(self, input: Array, dtype: Any, *, out: Array | None = None) -> Any:
        check_bytes(input, "input of fp8_transpose")
        if out is None:
            return self._arrays.copy(self._bytes_transposed(input))
        check_bytes(out, "out of fp8_transpose")
        check_shape(out, transposed_shape(input.shape), "out of fp8_transpose")
        check_disjoint(out, [input], "out of fp8_transpose")
        return self._arrays.put(out, self._bytes_transposed(input))

    def nvfp4_data_transpose(self, input: Array, *, out: Array | None) -> Any:
        check_codes(input, out, "nvfp4_data_transpose")
        codes = self._codes_transposed(input)
        return codes if out is None else self._arrays.put(out, codes)

    def nvfp4_2d_scale_transpose(self, input: Array, output: Array, M_tiles: int, K_tiles: int) -> None:
        check_scales(input, output, M_tiles, K_tiles, "nvfp4_2d_scale_transpose")
        check_disjoint(output, [input], "output of nvfp4_2d_scale_transpose")
        self._transpose_scales(input, output, M_tiles, K_tiles)

    @by_name
    def nvfp4_2d_multi_tensor_transpose(self, call: CallArguments) -> None:
        for data, columnwise, scale, columnwise_scale, down, across in checked_weights(call):
            self._arrays.put(columnwise, self._codes_transposed(data))
            self._transpose_scales(scale, columnwise_scale, down, across)

    def swap_first_dims(self, tensor: Array, *, out: Array | None) -> Any:
        if len(tensor.shape) < 2:
            raise ShapeError(expected("at least two dimensions", of="tensor of swap_first_dims", got=list(tensor.shape), do="reshape it"))
        swapped = self._first_swapped(tensor)
        if out is None:
            return self._arrays.contiguous(swapped)
        check_shape(out, swapped.shape, "out of swap_first_dims")
        check_same_dtype(out, tensor, "out of swap_first_dims")
        check_disjoint(out, [tensor], "out of swap_first_dims")
        return self._arrays.put(out, swapped)
