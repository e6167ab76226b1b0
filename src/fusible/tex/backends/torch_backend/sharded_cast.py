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
from fusible.tex.calls.layout import check_disjoint, check_equal_lengths, check_same_dtype
from fusible.tex.calls.memory_checks import check_no_inner_overlap
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
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.interface.sharded_cast import ShardedCast
from fusible.tex.protocol import check_amax_buffer, check_shape, fp8_format

__all__ = ["ShardedCastKernels"]

_FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16})
_FP32 = (torch.float32,)
_MX_BLOCKS: dict[str, Block] = {"rowwise": (1, 32), "colwise": (32, 1)}


class ShardedCastKernels(ShardedCast):
    @by_name
    def fp8_block_scaling_compute_partial_amax(self, call: CallArguments) -> None:
        _fill(*_amax_job(call.tensor, call.amax, call.h, call.w, call.start_offset, call.block_len, "fp8_block_scaling_compute_partial_amax"))

    @by_name
    def fp8_block_scaling_partial_cast(self, call: CallArguments) -> None:
        function = "fp8_block_scaling_partial_cast"
        fp8, block = fp8_format(call.out_dtype), square(call.block_len, function)
        part = check_slice(call.inp, call.h, call.w, call.start_offset, function, _FLOATING)
        check_tiles(call.scale, part, block, f"scale of {function}", _FP32)
        check_fragment(call.out, part.length, f"out of {function}")
        _store(call.out, cast_by_tiles(call.inp, part, block, call.scale, lambda x: encode(x, fp8)))

    @by_name
    def mxfp8_scaling_compute_partial_amax(self, call: CallArguments) -> None:
        function = "mxfp8_scaling_compute_partial_amax"
        part = check_slice(call.input, call.rows, call.cols, call.start_offset, function, _FLOATING)
        amaxes = {"rowwise": call.amax_rowwise, "colwise": call.amax_colwise}
        for name, amax in amaxes.items():
            check_tiles(amax, part, _MX_BLOCKS[name], f"amax_{name} of {function}", (call.input.dtype, torch.float32))
        for name, amax in amaxes.items():
            _fill(call.input, amax, part, _MX_BLOCKS[name])

    @by_name
    def mxfp8_scaling_partial_cast(self, call: CallArguments) -> None:
        function = "mxfp8_scaling_partial_cast"
        check_disjoint(call.output_rowwise, [call.output_colwise], f"output_rowwise of {function}")
        part = check_slice(call.input, call.rows, call.cols, call.start_offset, function, _FLOATING)
        jobs = {"rowwise": (call.output_rowwise, call.scale_inv_rowwise), "colwise": (call.output_colwise, call.scale_inv_colwise)}
        for name, (out, scale) in jobs.items():
            check_tiles(scale, part, _MX_BLOCKS[name], f"scale_inv_{name} of {function}", (torch.uint8, torch.float8_e8m0fnu))
            check_fragment(out, part.length, f"output_{name} of {function}")
        for name, (out, scale) in jobs.items():
            factors = factor_of_e8m0(scale.view(torch.uint8))
            _store(out, cast_by_tiles(call.input, part, _MX_BLOCKS[name], factors, lambda x: encode(x, DType.kFloat8E4M3)))

    @by_name
    def nvfp4_2d_compute_partial_amax(self, call: CallArguments) -> None:
        _fill(*_amax_job(call.tensor, call.amax, call.h, call.w, call.start_offset, call.block_len, "nvfp4_2d_compute_partial_amax"))

    @by_name
    def nvfp4_2d_partial_cast(self, call: CallArguments) -> None:
        _cast_nvfp4(
            *_cast_job(call.inp, call.out, call.scale, call.global_scale, call.h, call.w, call.start_offset, call.block_len, "nvfp4_2d_partial_cast")
        )

    @by_name
    def nvfp4_multi_tensor_compute_partial_amax(self, call: CallArguments) -> None:
        function = "nvfp4_multi_tensor_compute_partial_amax"
        lists = (call.master_weight_list, call.partial_amax_list, call.h_list, call.w_list, call.start_offset_list)
        check_equal_lengths(function, *lists, call.global_amax_list)
        for amax in call.global_amax_list:
            check_amax_buffer(amax, f"a global amax of {function}")
        for job in [_amax_job(*each, block_len=call.block_len, function=function) for each in zip(*lists, strict=True)]:
            _fill(*job)
        for weight, amax in zip(call.master_weight_list, call.global_amax_list, strict=True):
            amax.copy_(tensor_amax(weight).view(amax.shape))

    @by_name
    def nvfp4_multi_tensor_2d_partial_cast(self, call: CallArguments) -> None:
        function = "nvfp4_multi_tensor_2d_partial_cast"
        lists = (call.inp_list, call.out_list, call.scale_list, call.global_scale_list, call.h_list, call.w_list, call.start_offset_list)
        check_equal_lengths(function, *lists)
        for job in [_cast_job(*each, block_len=call.block_len, function=function) for each in zip(*lists, strict=True)]:
            _cast_nvfp4(*job)  # two outputs may share a byte, of which each has its half

    @by_name
    def nvfp4_expand_scale_to_fp8(self, call: CallArguments) -> None:
        function = "nvfp4_expand_scale_to_fp8"
        check_expansion(call.input, call.output, call.tile_rows, call.tile_cols, call.rows_padded, square(call.block_len, function), function)
        _expand(call.input, call.output, call.block_len)

    def nvfp4_compute_per_block_scale(self, block_amax: Tensor, scale: Tensor, global_amax: Tensor) -> None:
        function = "nvfp4_compute_per_block_scale"
        check_shape(scale, block_amax.shape, f"scale of {function}")
        check_amax_buffer(global_amax, f"global_amax of {function}")
        for numbers in (block_amax, scale):
            check_same_dtype(numbers, global_amax, f"the numbers per tile of {function}")
        scale.copy_(nvfp4.block_scale(block_amax, nvfp4.global_scale(global_amax).view(())))

    def nvfp4_compute_global_scale(self, global_amax: Tensor, global_scale: Tensor) -> None:
        check_shape(global_scale, global_amax.shape, "global_scale of nvfp4_compute_global_scale")
        global_scale.copy_(nvfp4.global_scale(global_amax.float()))

    @by_name
    def nvfp4_fused_scale(self, call: CallArguments) -> None:
        numbers = (call.block_amax, call.global_amax, call.per_block_scale, call.target_scale, call.target_amax)
        _check_fused_scale(numbers, call.tile_rows, call.tile_cols, call.rows_padded, call.block_len, "nvfp4_fused_scale")
        self._fused_scale(*numbers, call.block_len)

    @by_name
    def nvfp4_multi_tensor_fused_scale(self, call: CallArguments) -> None:
        function = "nvfp4_multi_tensor_fused_scale"
        lists = (call.block_amax_list, call.global_amax_list, call.per_block_scale_list, call.target_scale_list, call.target_amax_list)
        sizes = (call.tile_rows_list, call.tile_cols_list, call.rows_padded_list)
        check_equal_lengths(function, *lists, *sizes)
        for *numbers, rows, columns, padded in zip(*lists, *sizes, strict=True):
            _check_fused_scale(numbers, rows, columns, padded, call.block_len, function)
        for numbers in zip(*lists, strict=True):
            self._fused_scale(*numbers, call.block_len)

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
    check_no_inner_overlap(packed, f"out of {function}")
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
