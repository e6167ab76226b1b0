"""FP8 in blocks on lazy tensors: 1x128 and 128x128 with fp32 scales (DeepSeek-AI 2024, arXiv:2412.19437), and MXFP8, blocks of 32 with E8M0 scales
(OCP Microscaling Formats specification 1.0, 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.blocks import Block, block_amax, scale_blocks
from fusible.tex.backends.xla.fp8 import decode, encode
from fusible.tex.backends.xla.number_formats import encode_e8m0, reciprocal, scale_of_amax, times_power_of_two
from fusible.tex.formats import FLOAT8_BLOCKS, MXFP8, BlockCodec, BlockFormat, Copy
from fusible.tex.protocol import FP8_MAX, fp8_format

__all__ = ["FLOAT8_BLOCKS_CODEC", "MXFP8_CODEC"]


def _float8_blocks(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> Iterator[Copy]:
    """``cast(x * scale)`` and ``1 / scale`` of each block of the matrix ``x``; ``scale`` follows from the block's amax."""
    fp8, overflow, tiled = fp8_format(quantizer.dtype), float(x.dtype.max), FLOAT8_BLOCKS.is_tiled(quantizer)

    def cast(block: Block) -> tuple[Tensor, Tensor]:
        scale = scale_of_amax(block_amax(x, block), FP8_MAX[fp8], quantizer.amax_epsilon, quantizer.force_pow_2_scales, overflow)
        return encode(scale_blocks(lazy.cast(x, lazy.float32), scale, block), fp8), reciprocal(scale)

    for way, data, grid in _cast(cast, FLOAT8_BLOCKS, tiled, rowwise, columnwise):
        yield way, data if way == "rowwise" else lazy.transpose(data, 0, 1), _turned(grid, way, tiled)


def _float8_blocks_values(x: Any, way: str, scales: Tensor, shape: tuple[int, int], undo: bool) -> tuple[Tensor, None]:
    data = getattr(x, f"_{way}_data")
    data = lazy.reshape(data, shape) if way == "rowwise" else lazy.transpose(lazy.reshape(data, (shape[1], shape[0])), 0, 1)
    block = FLOAT8_BLOCKS.block(way, x._is_2D_scaled)
    return scale_blocks(decode(data, x._fp8_dtype), _turned(scales, way, x._is_2D_scaled), block), None


def _turned(grid: Tensor, way: str, tiled: bool) -> Tensor:
    """Scales by their block's place in the matrix as they are stored, and the other way round."""
    return grid if tiled == (way == "rowwise") else lazy.transpose(grid, 0, 1)


def _mxfp8(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> Iterator[Copy]:
    """``cast(x / 2^e)`` and the byte ``e + 127`` of each block of the matrix ``x``: the least ``2^e`` that is not below ``amax / fp8_max``."""
    fp8, tiled = fp8_format(quantizer.dtype), MXFP8.is_tiled(quantizer)

    def cast(block: Block) -> tuple[Tensor, Tensor]:
        code = encode_e8m0(block_amax(x, block), 1 / FP8_MAX[fp8])
        return encode(scale_blocks(lazy.cast(x, lazy.float32), code, block, _divided), fp8), code

    for way, data, grid in _cast(cast, MXFP8, tiled, rowwise, columnwise):
        yield way, data, _repeated(grid, 32, 0 if way == "rowwise" else 1) if tiled else grid


def _mxfp8_values(x: Any, way: str, scales: Tensor, shape: tuple[int, int], undo: bool) -> tuple[Tensor, None]:
    data = lazy.reshape(getattr(x, f"_{way}_data"), shape)
    return scale_blocks(decode(data, x._fp8_dtype), scales, MXFP8.block(way, False), _multiplied), None


def _exponent(code: Tensor) -> Tensor:
    return lazy.cast(code, lazy.int32) - 127


def _multiplied(x: Tensor, code: Tensor) -> Tensor:
    """``x * 2^(code - 127)``; NaN for 0xFF."""
    return lazy.where(code == 0xFF, float("nan"), times_power_of_two(x, _exponent(code)))


def _divided(x: Tensor, code: Tensor) -> Tensor:
    """``x * 2^(127 - code)``; NaN for 0xFF."""
    return lazy.where(code == 0xFF, float("nan"), times_power_of_two(x, 0 - _exponent(code)))


def _repeated(grid: Tensor, count: int, dim: int) -> Tensor:
    """Each row or column ``count`` times."""
    inserted = lazy.unsqueeze(grid, dim + 1)
    shape = list(inserted.shape)
    shape[dim + 1] = count
    return lazy.reshape(lazy.broadcast_to(inserted, tuple(shape)), tuple(size * (count if d == dim else 1) for d, size in enumerate(grid.shape)))


def _cast(
    cast: Callable[[Block], tuple[Tensor, Tensor]], form: BlockFormat, tiled: bool, rowwise: bool, columnwise: bool
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The result of ``cast`` for each copy that is asked for; of tiles, the same one."""
    ways = [way for way, asked in (("rowwise", rowwise), ("columnwise", columnwise)) if asked]
    data, grid = cast(form.block(ways[0], tiled))
    for way in ways:
        if way != ways[0] and not tiled:
            data, grid = cast(form.block(way, tiled))
        yield way, data, grid


FLOAT8_BLOCKS_CODEC = BlockCodec(lambda *asked: ({}, _float8_blocks(*asked)), _float8_blocks_values)
MXFP8_CODEC = BlockCodec(lambda *asked: ({}, _mxfp8(*asked)), _mxfp8_values)
