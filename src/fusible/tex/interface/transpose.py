"""Transposing quantized data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.interface.arguments import Shape, Tensor
from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import FP8DType, Size

__all__ = ["Transpose"]


class Transpose:
    """Movements of data that change no value."""

    @function("input", input="uint8 [*]", out="uint8")
    def fp8_transpose(self, input: Tensor, dtype: FP8DType, *, out: Tensor | None) -> Any:
        """``[*leading, last] -> [last, *leading]`` of uint8 FP8 data, contiguous; ``out``, unless None, is written and returned.

        ``dtype`` names the FP8 format of the bytes, which does not change the result. Raises ``ShapeError`` where ``out`` has another shape.
        """

    @function("input", input="uint8 [* n]", out="uint8")
    def nvfp4_data_transpose(self, input: Tensor, *, out: Tensor | None) -> Any:
        """``[*leading, K / 2] -> [K, M / 2]`` of packed E2M1 codes: the transpose of the ``[M, K]`` that they stand for.

        The low nibble of a byte is the even column's. ``out``, unless None, is written and returned. Raises ``ShapeError`` for an odd ``M`` and where
        ``out`` has another shape, ``DTypeError`` for data that are no bytes.
        """

    @function("input", input="byte [r c]", output="byte [s d]")
    def nvfp4_2d_scale_transpose(self, input: Tensor, output: Tensor, M_tiles: Size, K_tiles: Size) -> None:
        """``output[16 k + i, m] = input[16 m, k]`` for each 16x16 tile ``(m, k)`` and ``i`` below 16: a weight's column-wise scales from its
        row-wise ones, a byte each. What lies beyond the tiles becomes 0.

        ``input`` is at least ``[16 M_tiles - 15, K_tiles]``, ``output`` at least ``[16 K_tiles - 15, M_tiles]``; ``ShapeError`` otherwise.
        """

    @function(
        "rowwise_data_list rowwise_scale_inv_list",
        rowwise_data_list="k * byte [* n]",
        columnwise_data_list="k * byte [c *]",
        rowwise_scale_inv_list="k * byte [a b]",
        columnwise_scale_inv_list="k * byte [s d]",
        M_list="k * any",
        K_list="k * any",
        before="*",
        disjoint="columnwise_data_list columnwise_scale_inv_list",
    )
    def nvfp4_2d_multi_tensor_transpose(
        self,
        rowwise_data_list: Sequence[Tensor],
        columnwise_data_list: Sequence[Tensor],
        rowwise_scale_inv_list: Sequence[Tensor],
        columnwise_scale_inv_list: Sequence[Tensor],
        M_list: Shape,
        K_list: Shape,
    ) -> None:
        """For each weight ``[M, K]`` in 16x16 tiles: ``nvfp4_data_transpose`` and ``nvfp4_2d_scale_transpose`` into the column-wise lists."""

    @function("tensor", tensor="any [a b *]", out="=tensor [b a *]")
    def swap_first_dims(self, tensor: Tensor, *, out: Tensor | None) -> Any:
        """``[a, b, *rest] -> [b, a, *rest]``, contiguous, of any dtype; ``out``, unless None, is written and returned.

        Raises ``ShapeError`` below two dimensions and where ``out`` has another shape, ``DTypeError`` where it has another dtype.
        """
