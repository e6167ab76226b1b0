"""Casting slices of sharded master weights to 8 and 4 bits, and the scales of NVFP4."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.tex.interface.arguments import Shape, Tensor
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

    @function("tensor", tensor="float", amax="fp32 [a b]")
    def fp8_block_scaling_compute_partial_amax(self, tensor: Tensor, amax: Tensor, h: Size, w: Size, start_offset: Size, block_len: Count) -> None:
        """Overwrites ``amax`` (fp32, at least ``[ceil(h / block_len), ceil(w / block_len)]``) with the amax of each square tile."""

    @function("inp", inp="float (n)", out="byte (n)", scale="fp32 [a b]")
    def fp8_block_scaling_partial_cast(
        self, inp: Tensor, out: Tensor, scale: Tensor, h: Size, w: Size, start_offset: Size, block_len: Count, out_dtype: FP8DType
    ) -> None:
        """Overwrites ``out`` (``n`` bytes) with ``cast(inp * scale[tile])`` in the format ``out_dtype``; ``scale`` is fp32, shaped like an amax."""

    @function(
        "input",
        input="float",
        amax_rowwise="fp32|=input [a b]",
        amax_colwise="fp32|=input [c d]",
        before="*",
        disjoint="amax_rowwise amax_colwise",
    )
    def mxfp8_scaling_compute_partial_amax(
        self, input: Tensor, amax_rowwise: Tensor, amax_colwise: Tensor, rows: Size, cols: Size, start_offset: Size
    ) -> None:
        """Overwrites ``amax_rowwise`` (at least ``[rows, ceil(cols / 32)]``) with the amax of each 1x32 block, ``amax_colwise`` (at least
        ``[ceil(rows / 32), cols]``) with that of each 32x1 block; both of ``input``'s dtype or fp32."""

    @function(
        "input",
        input="float (n)",
        output_rowwise="byte (n)",
        output_colwise="byte (n)",
        scale_inv_rowwise="byte [a b]",
        scale_inv_colwise="byte [c d]",
        before="*",
        disjoint="output_rowwise output_colwise",
    )
    def mxfp8_scaling_partial_cast(
        self,
        input: Tensor,
        output_rowwise: Tensor,
        output_colwise: Tensor,
        scale_inv_rowwise: Tensor,
        scale_inv_colwise: Tensor,
        rows: Size,
        cols: Size,
        start_offset: Size,
    ) -> None:
        """Overwrites the outputs (``n`` bytes each) with ``cast(input * 2^(127 - scale_inv[block]))`` in E4M3; the E8M0 scales (uint8) are shaped
        like the amaxes, and neither output is transposed. Source: OCP Microscaling Formats specification 1.0 (2023)."""

    @function("tensor", tensor="float", amax="fp32 [a b]")
    def nvfp4_2d_compute_partial_amax(self, tensor: Tensor, amax: Tensor, h: Size, w: Size, start_offset: Size, block_len: Count = 16) -> None:
        """Overwrites ``amax`` (fp32, at least ``[ceil(h / block_len), ceil(w / block_len)]``) with the amax of each square tile."""

    @function("inp", inp="float (n)", out="uint8", scale="fp32 [a b]", global_scale="fp32 (1)")
    def nvfp4_2d_partial_cast(
        self, inp: Tensor, out: Tensor, scale: Tensor, global_scale: Tensor, h: Size, w: Size, start_offset: Size, block_len: Count = 16
    ) -> None:
        """Writes E2M1 codes to ``out``, two to a byte, the even column's in the low nibble; ``w`` is even.

        ``code = e2m1(inp * min(1 / (e4m3(scale[tile]) * (1 / global_scale)), FLT_MAX))``, saturating at 6, with ``scale`` (fp32) of
        ``nvfp4_compute_per_block_scale`` and ``global_scale`` (fp32 ``[1]``) of ``nvfp4_compute_global_scale``. ``out`` (uint8, or a tensor that
        holds it as ``_rowwise_data``) has the bytes ``start_offset // 2 : ceil((start_offset + n) / 2)`` of the packed weight; a nibble there that
        belongs to a neighbouring slice is kept.
        """

    @function(
        "master_weight_list",
        master_weight_list="k * float",
        partial_amax_list="k * fp32 [a b]",
        global_amax_list="k * fp32 (1)",
        h_list="k * any",
        w_list="k * any",
        start_offset_list="k * any",
        before="*",
        disjoint="partial_amax_list global_amax_list",
    )
    def nvfp4_multi_tensor_compute_partial_amax(
        self,
        master_weight_list: Sequence[Tensor],
        partial_amax_list: Sequence[Tensor],
        global_amax_list: Sequence[Tensor],
        h_list: Shape,
        w_list: Shape,
        start_offset_list: Shape,
        block_len: Count = 16,
    ) -> None:
        """``nvfp4_2d_compute_partial_amax`` of each, and ``max |slice|`` into each of ``global_amax_list`` (fp32 ``[1]``)."""

    @function(
        "inp_list",
        inp_list="k * float",
        out_list="k * uint8",
        scale_list="k * fp32 [a b]",
        global_scale_list="k * fp32 (1)",
        h_list="k * any",
        w_list="k * any",
        start_offset_list="k * any",
        before="*",
    )
    def nvfp4_multi_tensor_2d_partial_cast(
        self,
        inp_list: Sequence[Tensor],
        out_list: Sequence[Tensor],
        scale_list: Sequence[Tensor],
        global_scale_list: Sequence[Tensor],
        h_list: Shape,
        w_list: Shape,
        start_offset_list: Shape,
        block_len: Count = 16,
    ) -> None:
        """``nvfp4_2d_partial_cast`` of each."""

    @function("input", input="fp32 [tile_rows tile_cols]", output="byte [rows_padded w]")
    def nvfp4_expand_scale_to_fp8(self, input: Tensor, output: Tensor, tile_rows: Size, tile_cols: Size, rows_padded: Size, block_len: Count) -> None:
        """``output[r, c] = e4m3(input[r // block_len, c])``: scales of tiles (fp32 ``[tile_rows, tile_cols]``) as one byte per row of a tile.

        ``output`` is uint8 ``[rows_padded, at least tile_cols]``; what lies beyond the tiles becomes 0.
        """

    @function("block_amax", block_amax="fp32 (n)", scale="fp32 (n)", global_amax="fp32 (1)")
    def nvfp4_compute_per_block_scale(self, block_amax: Tensor, scale: Tensor, global_amax: Tensor) -> None:
        """``scale = min(block_amax * (S * (1 / 6)), FLT_MAX)``, fp32 of one shape, with ``S`` the global scale of ``global_amax`` (fp32 ``[1]``).

        The scale that a byte of E4M3 then holds is this number, rounded. Source: NVIDIA 2025, arXiv:2509.25149.
        """

    @function("global_amax", global_amax="fp32 (n)", global_scale="fp32 (n)")
    def nvfp4_compute_global_scale(self, global_amax: Tensor, global_scale: Tensor) -> None:
        """``global_scale = min(448 * 6 / global_amax, FLT_MAX)``, or 1 where that amax is 0 or infinite; fp32 of one shape, element by element."""

    @function(
        "block_amax",
        block_amax="fp32 [tile_rows tile_cols]",
        global_amax="fp32 (1)",
        per_block_scale="fp32 [tile_rows tile_cols]",
        target_scale="byte [rows_padded w]",
        target_amax="fp32 (1)",
        before="*",
        disjoint="per_block_scale target_scale target_amax",
    )
    def nvfp4_fused_scale(
        self,
        block_amax: Tensor,
        global_amax: Tensor,
        per_block_scale: Tensor,
        target_scale: Tensor,
        target_amax: Tensor,
        tile_rows: Size,
        tile_cols: Size,
        rows_padded: Size,
        block_len: Count,
    ) -> None:
        """``nvfp4_compute_per_block_scale`` into ``per_block_scale``, ``nvfp4_expand_scale_to_fp8`` of it into ``target_scale``, and ``global_amax``
        copied to ``target_amax`` (fp32 ``[1]``)."""

    @function(
        "block_amax_list",
        block_amax_list="k * fp32 [r c]",
        global_amax_list="k * fp32 (1)",
        per_block_scale_list="k * fp32 [r c]",
        target_scale_list="k * byte [p w]",
        target_amax_list="k * fp32 (1)",
        tile_rows_list="k * any",
        tile_cols_list="k * any",
        rows_padded_list="k * any",
        before="*",
        disjoint="per_block_scale_list target_scale_list target_amax_list",
    )
    def nvfp4_multi_tensor_fused_scale(
        self,
        block_amax_list: Sequence[Tensor],
        global_amax_list: Sequence[Tensor],
        per_block_scale_list: Sequence[Tensor],
        target_scale_list: Sequence[Tensor],
        target_amax_list: Sequence[Tensor],
        tile_rows_list: Shape,
        tile_cols_list: Shape,
        rows_padded_list: Shape,
        block_len: Count,
    ) -> None:
        """``nvfp4_fused_scale`` of each."""
