"""Casting slices of sharded master weights to 8 and 4 bits, and the scales of NVFP4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import Count, FP8DType, Size

__all__ = ["ShardedCast"]


class ShardedCast:
    """A rank of a distributed optimizer holds elements ``start_offset : start_offset + n`` of a row-major weight ``[h, w]``, as ``n`` fp32, bf16 or
    fp16 numbers in any shape. It takes the amax of each tile as far as it sees it (the ranks then reduce these), and casts its elements by the scales
    of the whole.

    An amax of a tile that the slice does not reach is 0, and NaN where an element is NaN; a larger buffer than the tiles need keeps what lies beyond
    them. Casts round to nearest even and saturate, infinities too. Every function raises ``ShapeError`` for a slice that leaves the weight and for
    buffers that do not fit, ``DTypeError`` for other types, ``ArgumentError`` for a ``block_len`` below 1, all before anything is written.
    """

    @function("tensor")
    def fp8_block_scaling_compute_partial_amax(self, tensor: Any, amax: Any, h: Size, w: Size, start_offset: Size, block_len: Count) -> None:
        """Overwrites ``amax`` (fp32, at least ``[ceil(h / block_len), ceil(w / block_len)]``) with the amax of each square tile."""

    @function("inp")
    def fp8_block_scaling_partial_cast(
        self, inp: Any, out: Any, scale: Any, h: Size, w: Size, start_offset: Size, block_len: Count, out_dtype: FP8DType
    ) -> None:
        """Overwrites ``out`` (``n`` bytes) with ``cast(inp * scale[tile])`` in the format ``out_dtype``; ``scale`` is fp32, shaped like an amax."""

    @function("input")
    def mxfp8_scaling_compute_partial_amax(
        self, input: Any, amax_rowwise: Any, amax_colwise: Any, rows: Size, cols: Size, start_offset: Size
    ) -> None:
        """Overwrites ``amax_rowwise`` (at least ``[rows, ceil(cols / 32)]``) with the amax of each 1x32 block, ``amax_colwise`` (at least
        ``[ceil(rows / 32), cols]``) with that of each 32x1 block; both of ``input``'s dtype or fp32."""

    @function("input")
    def mxfp8_scaling_partial_cast(
        self,
        input: Any,
        output_rowwise: Any,
        output_colwise: Any,
        scale_inv_rowwise: Any,
        scale_inv_colwise: Any,
        rows: Size,
        cols: Size,
        start_offset: Size,
    ) -> None:
        """Overwrites the outputs (``n`` bytes each) with ``cast(input * 2^(127 - scale_inv[block]))`` in E4M3; the E8M0 scales (uint8) are shaped
        like the amaxes, and neither output is transposed. Source: OCP Microscaling Formats specification 1.0 (2023)."""

    @function("tensor")
    def nvfp4_2d_compute_partial_amax(self, tensor: Any, amax: Any, h: Size, w: Size, start_offset: Size, block_len: Count = 16) -> None:
        """Overwrites ``amax`` (fp32, at least ``[ceil(h / block_len), ceil(w / block_len)]``) with the amax of each square tile."""

    @function("inp")
    def nvfp4_2d_partial_cast(
        self, inp: Any, out: Any, scale: Any, global_scale: Any, h: Size, w: Size, start_offset: Size, block_len: Count = 16
    ) -> None:
        """Writes E2M1 codes to ``out``, two to a byte, the even column's in the low nibble; ``w`` is even.

        ``code = e2m1(inp * min(1 / (e4m3(scale[tile]) * (1 / global_scale)), FLT_MAX))``, saturating at 6, with ``scale`` (fp32) of
        ``nvfp4_compute_per_block_scale`` and ``global_scale`` (fp32 ``[1]``) of ``nvfp4_compute_global_scale``. ``out`` (uint8, or a tensor that
        holds it as ``_rowwise_data``) has the bytes ``start_offset // 2 : ceil((start_offset + n) / 2)`` of the packed weight; a nibble there that
        belongs to a neighbouring slice is kept.
        """

    @function("master_weight_list")
    def nvfp4_multi_tensor_compute_partial_amax(
        self,
        master_weight_list: Sequence[Any],
        partial_amax_list: Sequence[Any],
        global_amax_list: Sequence[Any],
        h_list: Sequence[int],
        w_list: Sequence[int],
        start_offset_list: Sequence[int],
        block_len: Count = 16,
    ) -> None:
        """``nvfp4_2d_compute_partial_amax`` of each, and ``max |slice|`` into each of ``global_amax_list`` (fp32 ``[1]``)."""

    @function("inp_list")
    def nvfp4_multi_tensor_2d_partial_cast(
        self,
        inp_list: Sequence[Any],
        out_list: Sequence[Any],
        scale_list: Sequence[Any],
        global_scale_list: Sequence[Any],
        h_list: Sequence[int],
        w_list: Sequence[int],
        start_offset_list: Sequence[int],
        block_len: Count = 16,
    ) -> None:
        """``nvfp4_2d_partial_cast`` of each."""

    @function("input")
    def nvfp4_expand_scale_to_fp8(self, input: Any, output: Any, tile_rows: Size, tile_cols: Size, rows_padded: Size, block_len: Count) -> None:
        """``output[r, c] = e4m3(input[r // block_len, c])``: scales of tiles (fp32 ``[tile_rows, tile_cols]``) as one byte per row of a tile.

        ``output`` is uint8 ``[rows_padded, at least tile_cols]``; what lies beyond the tiles becomes 0.
        """

    @function("block_amax")
    def nvfp4_compute_per_block_scale(self, block_amax: Any, scale: Any, global_amax: Any) -> None:
        """``scale = min(block_amax * (S * (1 / 6)), FLT_MAX)``, fp32 of one shape, with ``S`` the global scale of ``global_amax`` (fp32 ``[1]``).

        The scale that a byte of E4M3 then holds is this number, rounded. Source: NVIDIA 2025, arXiv:2509.25149.
        """

    @function("global_amax")
    def nvfp4_compute_global_scale(self, global_amax: Any, global_scale: Any) -> None:
        """``global_scale = min(448 * 6 / global_amax, FLT_MAX)``, or 1 where that amax is 0 or infinite; fp32 of one shape, element by element."""

    @function("block_amax")
    def nvfp4_fused_scale(
        self,
        block_amax: Any,
        global_amax: Any,
        per_block_scale: Any,
        target_scale: Any,
        target_amax: Any,
        tile_rows: Size,
        tile_cols: Size,
        rows_padded: Size,
        block_len: Count,
    ) -> None:
        """``nvfp4_compute_per_block_scale`` into ``per_block_scale``, ``nvfp4_expand_scale_to_fp8`` of it into ``target_scale``, and ``global_amax``
        copied to ``target_amax`` (fp32 ``[1]``)."""

    @function("block_amax_list")
    def nvfp4_multi_tensor_fused_scale(
        self,
        block_amax_list: Sequence[Any],
        global_amax_list: Sequence[Any],
        per_block_scale_list: Sequence[Any],
        target_scale_list: Sequence[Any],
        target_amax_list: Sequence[Any],
        tile_rows_list: Sequence[int],
        tile_cols_list: Sequence[int],
        rows_padded_list: Sequence[int],
        block_len: Count,
    ) -> None:
        """``nvfp4_fused_scale`` of each."""
