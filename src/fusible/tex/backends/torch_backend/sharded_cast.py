"""Casts of slices of sharded master weights, and the scales of NVFP4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.errors import ShapeError, expected
from fusible.tex.backends.torch_backend import nvfp4_scales as nvfp4
from fusible.tex.backends.torch_backend.fp8 import decode, encode, tensor_amax
from fusible.tex.backends.torch_backend.number_formats import encode_e2m1, factor_of_e8m0, pack_nibbles
from fusible.tex.backends.torch_backend.tiles import cast_by_tiles, tile_amaxes
from fusible.tex.calls.layout import check_apart, check_equal_lengths, check_same_dtype
from fusible.tex.calls.memory_checks import check_own
from fusible.tex.calls.sharded_cast import (
    Block,
    MatrixSlice,
    check_expansion,
    check_fragment,
    check_slice,
    check_tiles,
    square,
)
from fusible.tex.enums import DType
from fusible.tex.interface.sharded_cast import ShardedCast
from fusible.tex.protocol import check_amax_buffer, check_shape, fp8_format

__all__ = ["ShardedCastKernels"]

_FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16})
_FP32 = (torch.float32,)
_MX_BLOCKS: dict[str, Block] = {"rowwise": (1, 32), "colwise": (32, 1)}


class ShardedCastKernels(ShardedCast):
    def fp8_block_scaling_compute_partial_amax(self, tensor: Any, amax: Any, h: int, w: int, start_offset: int, block_len: int) -> None:
        _fill(*_amax_job(tensor, amax, h, w, start_offset, block_len, "fp8_block_scaling_compute_partial_amax"))

    def fp8_block_scaling_partial_cast(
        self, inp: Any, out: Any, scale: Any, h: int, w: int, start_offset: int, block_len: int, out_dtype: Any
    ) -> None:
        function = "fp8_block_scaling_partial_cast"
        fp8, block = fp8_format(out_dtype), square(block_len, function)
        part = check_slice(inp, h, w, start_offset, function, _FLOATING)
        check_tiles(scale, part, block, f"scale of {function}", _FP32)
        check_fragment(out, part.length, f"out of {function}")
        _store(out, cast_by_tiles(inp, part, block, scale, lambda x: encode(x, fp8)))

    def mxfp8_scaling_compute_partial_amax(self, input: Any, amax_rowwise: Any, amax_colwise: Any, rows: int, cols: int, start_offset: int) -> None:
        function = "mxfp8_scaling_compute_partial_amax"
        part = check_slice(input, rows, cols, start_offset, function, _FLOATING)
        amaxes = {"rowwise": amax_rowwise, "colwise": amax_colwise}
        for name, amax in amaxes.items():
            check_tiles(amax, part, _MX_BLOCKS[name], f"amax_{name} of {function}", (input.dtype, torch.float32))
        for name, amax in amaxes.items():
            _fill(input, amax, part, _MX_BLOCKS[name])

    def mxfp8_scaling_partial_cast(
        self,
        input: Any,
        output_rowwise: Any,
        output_colwise: Any,
        scale_inv_rowwise: Any,
        scale_inv_colwise: Any,
        rows: int,
        cols: int,
        start_offset: int,
    ) -> None:
        function = "mxfp8_scaling_partial_cast"
        check_apart(output_rowwise, [output_colwise], f"output_rowwise of {function}")
        part = check_slice(input, rows, cols, start_offset, function, _FLOATING)
        jobs = {"rowwise": (output_rowwise, scale_inv_rowwise), "colwise": (output_colwise, scale_inv_colwise)}
        for name, (out, scale) in jobs.items():
            check_tiles(scale, part, _MX_BLOCKS[name], f"scale_inv_{name} of {function}", (torch.uint8, torch.float8_e8m0fnu))
            check_fragment(out, part.length, f"output_{name} of {function}")
        for name, (out, scale) in jobs.items():
            factors = factor_of_e8m0(scale.view(torch.uint8))
            _store(out, cast_by_tiles(input, part, _MX_BLOCKS[name], factors, lambda x: encode(x, DType.kFloat8E4M3)))

    def nvfp4_2d_compute_partial_amax(self, tensor: Any, amax: Any, h: int, w: int, start_offset: int, block_len: int = 16) -> None:
        _fill(*_amax_job(tensor, amax, h, w, start_offset, block_len, "nvfp4_2d_compute_partial_amax"))

    def nvfp4_2d_partial_cast(
        self, inp: Any, out: Any, scale: Any, global_scale: Any, h: int, w: int, start_offset: int, block_len: int = 16
    ) -> None:
        _cast_nvfp4(*_cast_job(inp, out, scale, global_scale, h, w, start_offset, block_len, "nvfp4_2d_partial_cast"))

    def nvfp4_multi_tensor_compute_partial_amax(
        self,
        master_weight_list: Sequence[Any],
        partial_amax_list: Sequence[Any],
        global_amax_list: Sequence[Any],
        h_list: Sequence[int],
        w_list: Sequence[int],
        start_offset_list: Sequence[int],
        block_len: int = 16,
    ) -> None:
        function = "nvfp4_multi_tensor_compute_partial_amax"
        lists = (master_weight_list, partial_amax_list, h_list, w_list, start_offset_list)
        check_equal_lengths(function, *lists, global_amax_list)
        for amax in global_amax_list:
            check_amax_buffer(amax, f"a global amax of {function}")
        for job in [_amax_job(*each, block_len=block_len, function=function) for each in zip(*lists, strict=True)]:
            _fill(*job)
        for weight, amax in zip(master_weight_list, global_amax_list, strict=True):
            amax.copy_(tensor_amax(weight).view(amax.shape))

    def nvfp4_multi_tensor_2d_partial_cast(
        self,
        inp_list: Sequence[Any],
        out_list: Sequence[Any],
        scale_list: Sequence[Any],
        global_scale_list: Sequence[Any],
        h_list: Sequence[int],
        w_list: Sequence[int],
        start_offset_list: Sequence[int],
        block_len: int = 16,
    ) -> None:
        function = "nvfp4_multi_tensor_2d_partial_cast"
        lists = (inp_list, out_list, scale_list, global_scale_list, h_list, w_list, start_offset_list)
        check_equal_lengths(function, *lists)
        for job in [_cast_job(*each, block_len=block_len, function=function) for each in zip(*lists, strict=True)]:
            _cast_nvfp4(*job)  # two outputs may share a byte, of which each has its half

    def nvfp4_expand_scale_to_fp8(self, input: Any, output: Any, tile_rows: int, tile_cols: int, rows_padded: int, block_len: int) -> None:
        function = "nvfp4_expand_scale_to_fp8"
        check_expansion(input, output, tile_rows, tile_cols, rows_padded, square(block_len, function), function)
        _expand(input, output, block_len)

    def nvfp4_compute_per_block_scale(self, block_amax: Any, scale: Any, global_amax: Any) -> None:
        function = "nvfp4_compute_per_block_scale"
        check_shape(scale, block_amax.shape, f"scale of {function}")
        check_amax_buffer(global_amax, f"global_amax of {function}")
        for numbers in (block_amax, scale):
            check_same_dtype(numbers, global_amax, f"the numbers per tile of {function}")
        scale.copy_(nvfp4.block_scale(block_amax, nvfp4.global_scale(global_amax).view(())))

    def nvfp4_compute_global_scale(self, global_amax: Any, global_scale: Any) -> None:
        check_shape(global_scale, global_amax.shape, "global_scale of nvfp4_compute_global_scale")
        global_scale.copy_(nvfp4.global_scale(global_amax.float()))

    def nvfp4_fused_scale(
        self,
        block_amax: Any,
        global_amax: Any,
        per_block_scale: Any,
        target_scale: Any,
        target_amax: Any,
        tile_rows: int,
        tile_cols: int,
        rows_padded: int,
        block_len: int,
    ) -> None:
        numbers = (block_amax, global_amax, per_block_scale, target_scale, target_amax)
        _check_fused_scale(numbers, tile_rows, tile_cols, rows_padded, block_len, "nvfp4_fused_scale")
        self._fused_scale(*numbers, block_len)

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
        block_len: int,
    ) -> None:
        function = "nvfp4_multi_tensor_fused_scale"
        lists = (block_amax_list, global_amax_list, per_block_scale_list, target_scale_list, target_amax_list)
        sizes = (tile_rows_list, tile_cols_list, rows_padded_list)
        check_equal_lengths(function, *lists, *sizes)
        for *numbers, rows, columns, padded in zip(*lists, *sizes, strict=True):
            _check_fused_scale(numbers, rows, columns, padded, block_len, function)
        for numbers in zip(*lists, strict=True):
            self._fused_scale(*numbers, block_len)

    def _fused_scale(self, block_amax: Tensor, amax: Tensor, block_scale: Tensor, target_scale: Tensor, target_amax: Tensor, block_len: int) -> None:
        self.nvfp4_compute_per_block_scale(block_amax, block_scale, amax)
        _expand(block_scale, target_scale, block_len)
        target_amax.copy_(amax.view(target_amax.shape))


def _amax_job(x: Tensor, amax: Tensor, h: int, w: int, start: int, block_len: int, function: str) -> tuple[Tensor, Tensor, MatrixSlice, Block]:
    """The checked arguments of ``_fill`` for square tiles."""
    block = square(block_len, function)
    part = check_slice(x, h, w, start, function, _FLOATING)
    check_tiles(amax, part, block, f"amax of {function}", _FP32)
    return x, amax, part, block


def _fill(x: Tensor, amax: Tensor, part: MatrixSlice, block: Block) -> None:
    rows, columns = part.tiles(block)
    amax[:rows, :columns].copy_(tile_amaxes(x, part, block))


def _store(out: Tensor, data: Tensor) -> None:
    out.view(torch.uint8).copy_(data.view(out.shape))


def _cast_job(
    x: Tensor, out: Any, scale: Tensor, global_scale: Tensor, h: int, w: int, start: int, block_len: int, function: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, MatrixSlice, Block]:
    """The checked arguments of ``_cast_nvfp4``."""
    block = square(block_len, function)
    part = check_slice(x, h, w, start, function, _FLOATING)
    if w % 2:
        raise ShapeError(expected("an even width", of=f"w of {function}", got=w, do="pad it, as two elements share a byte"))
    check_tiles(scale, part, block, f"scale of {function}", _FP32)
    check_amax_buffer(global_scale, f"global_scale of {function}")
    packed = getattr(out, "_rowwise_data", out)
    check_fragment(packed, (start + part.length + 1) // 2 - start // 2, f"out of {function}")
    check_own(packed, f"out of {function}")
    return x, packed, scale, global_scale, part, block


def _e4m3_value(scale: Tensor) -> Tensor:
    """What is left of block scales when E4M3 has rounded them."""
    return decode(nvfp4.rounded_block_scale(scale), DType.kFloat8E4M3)


def _cast_nvfp4(x: Tensor, out: Tensor, scale: Tensor, global_scale: Tensor, part: MatrixSlice, block: Block) -> None:
    if not part.length:
        return
    codes = cast_by_tiles(x, part, block, nvfp4.element_factor(_e4m3_value(scale), global_scale.view(())), encode_e2m1)
    former = out.view(torch.uint8).reshape(-1)
    before = former[:1] & 0xF if part.start % 2 else codes[:0]
    after = former[-1:] >> 4 if (part.start + part.length) % 2 else codes[:0]
    if before.numel() or after.numel():
        codes = torch.cat((before, codes, after))
    _store(out, pack_nibbles(codes))


def _check_fused_scale(numbers: Sequence[Any], tile_rows: int, tile_cols: int, rows_padded: int, block_len: int, function: str) -> None:
    block_amax, global_amax, per_block_scale, target_scale, target_amax = numbers
    check_shape(per_block_scale, block_amax.shape, f"per_block_scale of {function}")
    check_amax_buffer(global_amax, f"global_amax of {function}")
    check_amax_buffer(target_amax, f"target_amax of {function}")
    for tiles in (block_amax, per_block_scale):
        check_same_dtype(tiles, global_amax, f"the numbers per tile of {function}")
    check_expansion(per_block_scale, target_scale, tile_rows, tile_cols, rows_padded, square(block_len, function), function)


def _expand(scale: Tensor, output: Tensor, block_len: int) -> None:
    rounded = nvfp4.rounded_block_scale(scale)
    rows, columns = rounded.shape
    bytes_, filled = output.view(torch.uint8), min(rows * block_len, output.shape[0])
    bytes_[:filled, :columns].copy_(rounded.repeat_interleave(block_len, 0)[:filled])
    bytes_[filled:].zero_()
    bytes_[:, columns:].zero_()
