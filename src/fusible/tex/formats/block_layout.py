"""Block-scaled formats: which buffers a quantized tensor has, their shapes and types, and what a quantizer of them may ask for.

A tensor ``[*leading, K]`` is a matrix of ``M`` rows. Its row-wise copy has one scale per block of elements along a row, its column-wise copy one per
block along a column; with two-dimensional scaling both have one per square tile. The names of the buffers are those that NVIDIA's constructors give
them; the attributes of a tensor have an underscore before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.enums import DType
from fusible.tex.formats.format import format_of, logical_shape, scaling
from fusible.tex.protocol import check_same_device, check_shape, fp8_format, outer, to_dtype, transposed_shape

__all__ = [
    "BLOCK_FORMATS",
    "BlockFormat",
    "buffer_specs",
    "check_block_output",
    "check_block_quantizer",
    "check_block_shape",
    "check_scales",
    "data_shape",
    "is_tiled",
    "scale_shape",
    "storage_options",
    "used_scales",
]


class BlockFormat(NamedTuple):
    """``length``: elements per block; ``transposed``: whether column-wise data lies as ``[K, *leading]``; ``whole``: whether blocks must be full.

    ``scale_dtype`` is the type in which scales are stored: E8M0 and E4M3 as bytes.
    """

    length: int
    transposed: bool
    whole: bool
    scale_dtype: torch.dtype


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "block": BlockFormat(128, True, False, torch.float32),
    "mxfp8": BlockFormat(32, False, True, torch.uint8),
    "nvfp4": BlockFormat(16, True, True, torch.uint8),
}


def is_tiled(quantizer: Any) -> bool:
    """Whether ``quantizer`` takes one scale per square tile."""
    return quantizer.block_scaling_dim == 2 if scaling(quantizer) == "block" else bool(quantizer.with_2d_quantization)


def data_shape(name: str, shape: Sequence[int], columnwise: bool) -> tuple[int, ...]:
    """The shape of the data of a tensor of ``shape``. NVFP4 packs two elements of the last stored dimension into a byte."""
    stored = transposed_shape(shape) if columnwise and BLOCK_FORMATS[name].transposed else tuple(shape)
    if name != "nvfp4":
        return stored
    if stored[-1] % 2:  # rows are only even together
        stored = (stored[0], outer(shape))
    return (*stored[:-1], stored[-1] // 2)


def used_scales(name: str, shape: Sequence[int], columnwise: bool, tiled: bool) -> tuple[int, int]:
    """The shape of the scales that mean something: the first rows and columns of the matrix of scales.

    1x128 blocks of FP8 lie with the blocks first, ``[ceil(K / 128), M]`` and ``[ceil(M / 128), K]``; 128x128 ones as tiles, transposed for the
    column-wise copy; MXFP8 as ``[M, K / 32]`` and ``[M / 32, K]``; NVFP4 as ``[M, K / 16]`` and ``[K, M / 16]``.
    """
    rows, columns, length = outer(shape), shape[-1], BLOCK_FORMATS[name].length
    row_blocks, column_blocks = -(-rows // length), -(-columns // length)
    if name == "block" and tiled:
        return (column_blocks, row_blocks) if columnwise else (row_blocks, column_blocks)
    if name == "block":
        return (row_blocks, columns) if columnwise else (column_blocks, rows)
    if name == "mxfp8":
        return (row_blocks, columns) if columnwise else (rows, column_blocks)
    return (columns, row_blocks) if columnwise else (rows, column_blocks)


def scale_shape(name: str, shape: Sequence[int], columnwise: bool, tiled: bool) -> tuple[int, int]:
    """The shape of the matrix of scales, padded as NVIDIA's products read it: to 128 lines of 4 blocks, or FP8 blocks to 4 in the last dimension."""
    lines, blocks = used_scales(name, shape, columnwise, tiled)
    multiples = (1, 4) if name == "block" else (4, 128) if name == "mxfp8" and columnwise else (128, 4)
    return -(-lines // multiples[0]) * multiples[0], -(-blocks // multiples[1]) * multiples[1]


def check_scales(scales: Any, least: Sequence[int], whole: Sequence[int], of: str) -> None:
    """Raise ``ShapeError`` unless there is a matrix of scales with ``least`` lines and blocks at least: none is used for two blocks. ``whole`` is the
    padded shape."""
    if scales is None or len(scales.shape) != 2 or scales.shape[0] < least[0] or scales.shape[1] < least[1]:
        got = "None" if scales is None else list(scales.shape)
        raise ShapeError(expected(f"shape {list(whole)}", of=of, got=got, do="pass one scale per block, padded"))


def buffer_specs(quantizer: Any, shape: Sequence[int], rowwise: bool, columnwise: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every buffer of a tensor of ``shape`` with the given copies, by name."""
    name, specs = scaling(quantizer), {}
    scale_dtype, tiled = BLOCK_FORMATS[name].scale_dtype, is_tiled(quantizer)
    copies = [way for way, asked in (("rowwise", rowwise), ("columnwise", columnwise)) if asked]
    for way in copies:
        specs[f"{way}_data"] = data_shape(name, shape, way == "columnwise"), torch.uint8
        specs[f"{way}_scale_inv"] = scale_shape(name, shape, way == "columnwise", tiled), scale_dtype
    if name == "nvfp4":
        for way in copies:
            lines = outer(shape) if way == "rowwise" else shape[-1]
            specs[f"amax_{way}"] = (lines if quantizer.row_scaled_nvfp4 else 1,), torch.float32
    return specs


def storage_options(quantizer: Any) -> dict[str, Any]:
    """What beside the buffers a tensor of ``quantizer`` is made of, by the names of the constructors."""
    name = scaling(quantizer)
    if name == "block":
        return {"fp8_dtype": fp8_format(quantizer.dtype), "is_2D_scaled": is_tiled(quantizer)}
    swizzled = {"with_gemm_swizzled_scales": bool(quantizer.optimize_for_gemm)}
    if name == "mxfp8":
        return {"fp8_dtype": fp8_format(quantizer.dtype), **swizzled}
    options = {option: getattr(quantizer, option) for option in ("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max")}
    return {"fp4_dtype": DType.kFloat4E2M1, **swizzled, **options}


def check_block_quantizer(quantizer: Any) -> None:
    """Raise for a combination of options that has no meaning."""
    name = scaling(quantizer)
    if name == "block":
        fp8_format(quantizer.dtype)
        if quantizer.block_scaling_dim not in (1, 2):
            got = quantizer.block_scaling_dim
            raise ArgumentError(expected("1 or 2", of="block_scaling_dim of a quantizer", got=got, do="pass 1 for 1x128 blocks, 2 for 128x128"))
    elif name == "mxfp8":
        fp8_format(quantizer.dtype)
    else:
        _check_nvfp4(quantizer)


def _check_nvfp4(quantizer: Any) -> None:
    of = "an NVFP4 quantizer"
    if to_dtype(quantizer.dtype) != DType.kFloat4E2M1:
        raise DTypeError(expected("kFloat4E2M1", of=of, got=repr(quantizer.dtype), do="pass that type"))
    if quantizer.row_scaled_nvfp4 and quantizer.with_2d_quantization:
        raise ArgumentError(expected("16x1 blocks with an amax per row", of=of, got="16x16 tiles", do="choose one of the two"))
    if quantizer.nvfp4_use_4over6:
        for option in ("with_rht", "stochastic_rounding"):
            if getattr(quantizer, option):
                raise ArgumentError(expected(f"no {option} beside 4-over-6", of=of, got="both", do="choose one of the two"))
        if quantizer.nvfp4_e4m3_max not in (448, 256) or quantizer.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            got = f"{quantizer.nvfp4_e4m3_max} and {quantizer.nvfp4_4over6_err_mode!r}"
            raise ArgumentError(expected("an E4M3 bound of 448 or 256, and MAE or MSE", of=of, got=got, do="pass one of each"))
    if quantizer.with_rht and not quantizer.with_post_rht_amax:
        raise ArgumentError(expected("with_post_rht_amax beside with_rht", of=of, got="only with_rht", do="set both"))


def check_block_shape(quantizer: Any, shape: Sequence[int]) -> None:
    """Raise ``ShapeError`` unless a tensor of ``shape`` consists of whole blocks, where the format asks for that."""
    length, _, whole, _ = BLOCK_FORMATS[scaling(quantizer)]
    if not shape:
        raise ShapeError(expected("at least one dimension", of="a tensor to quantize in blocks", got="none", do="reshape it"))
    if whole and (shape[-1] % length or outer(shape) % length):
        wanted = f"rows and columns in multiples of {length}"
        raise ShapeError(expected(wanted, of=f"a tensor to quantize to {scaling(quantizer).upper()}", got=list(shape), do="pad it with zeros"))


def check_block_output(output: Any, quantizer: Any, x: Any, stored: Callable[[torch.dtype], Any] = lambda dtype: dtype) -> None:
    """Raise unless ``output`` is a tensor of ``quantizer``'s format into which ``x`` fits; ``stored`` gives the backend's value of a dtype."""
    name = scaling(quantizer)
    if format_of(output) != name:
        got = type(output).__qualname__
        raise DTypeError(expected(f"a quantized tensor of {name}", of="output of quantize", got=got, do="make one by quantizer.make_empty"))
    shape = logical_shape(output)
    if outer(shape) != outer(x.shape) or shape[-1] != x.shape[-1]:
        check_shape(x, shape, "the tensor quantized into output")
    for buffer, (wanted, dtype) in buffer_specs(quantizer, shape, True, True).items():
        held = getattr(output, f"_{buffer}")
        if held is None:
            continue
        size = math.prod(held.shape)
        if size != math.prod(wanted) or (not buffer.endswith("data") and tuple(held.shape) != wanted) or held.dtype is not stored(dtype):
            got = f"{held.dtype} {list(held.shape)}"
            raise ShapeError(expected(f"{dtype} {list(wanted)}", of=f"{buffer} of the output", got=got, do="make it by quantizer.make_empty"))
        check_same_device(held, x, "output of quantize")
