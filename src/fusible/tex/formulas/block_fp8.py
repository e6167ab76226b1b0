"""FP8 in blocks: 1x128 and 128x128 with fp32 scales (DeepSeek-AI 2024, arXiv:2412.19437), and MXFP8, blocks of 32 with E8M0 scales (OCP Microscaling
Formats specification 1.0, 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fusible.tex.formats import FLOAT8_BLOCKS, MXFP8, BlockCodec, BlockFormat, Copy
from fusible.tex.formulas.arrays import Array, Arrays, Function
from fusible.tex.interface.arguments import QuantizedTensor
from fusible.tex.protocol import FP8_MAX, fp8_format

__all__ = ["BlockFp8"]

Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """What a framework does with blocks of a matrix. ``block`` is their rows and columns."""

    arrays: Arrays
    amax: Function
    """``(x, block)``: ``max |x|`` of every block, fp32; NaN where an element is NaN."""
    scaled: Function
    """``(x, factors, block)``: a new fp32 matrix, each block times its factor."""
    divided: Function
    """``(x, exponents, block)``: an fp32 matrix, each block over ``2^(byte - 127)``; NaN for 0xFF."""
    multiplied: Function
    """``(x, exponents, block)``: the fp32 matrix ``x``, each block times ``2^(byte - 127)``."""
    scale_of_amax: Function
    """``(amax, largest, epsilon, power_of_two, where_infinite)``."""
    exponent: Function
    """``(amax, factor)``: the E8M0 byte of ``amax * factor``, rounded up to a power of two."""
    reciprocal: Function
    largest: Function
    """``(dtype)``: its largest finite number."""

    def codecs(self) -> dict[BlockFormat, BlockCodec]:
        """The codecs of both formats."""
        return {
            FLOAT8_BLOCKS: BlockCodec(lambda *asked: ({}, self._float8_blocks(*asked)), self._float8_blocks_values),
            MXFP8: BlockCodec(lambda *asked: ({}, self._mxfp8(*asked)), self._mxfp8_values),
        }

    def _float8_blocks(self, x: Array, quantizer: Any, rowwise: bool, columnwise: bool) -> Iterator[Copy]:
        """``cast(x * scale)`` and ``1 / scale`` of each block of the matrix ``x``; ``scale`` follows from the block's amax."""
        fp8, overflow, tiled = fp8_format(quantizer.dtype), self.largest(x.dtype), FLOAT8_BLOCKS.is_tiled(quantizer)

        def cast(block: Block) -> tuple[Any, Any]:
            scale = self.scale_of_amax(self.amax(x, block), FP8_MAX[fp8], quantizer.amax_epsilon, quantizer.force_pow_2_scales, overflow)
            return self.arrays.fp8.encode(self.scaled(x, scale, block), fp8), self.reciprocal(scale)

        for way, data, grid in self._cast(cast, FLOAT8_BLOCKS, tiled, rowwise, columnwise):
            yield way, data if way == "rowwise" else self.arrays.transpose(data), self._turned(grid, way, tiled)

    def _float8_blocks_values(self, x: QuantizedTensor, way: str, scales: Array, shape: tuple[int, int], undo: bool) -> tuple[Any, None]:
        xp, data = self.arrays, getattr(x, f"_{way}_data")
        data = xp.reshape(data, shape) if way == "rowwise" else xp.transpose(xp.reshape(data, (shape[1], shape[0])))
        block = FLOAT8_BLOCKS.block(way, x._is_2D_scaled)
        return self.scaled(self.arrays.fp8.decode(data, x._fp8_dtype), self._turned(scales, way, x._is_2D_scaled), block), None

    def _turned(self, grid: Array, way: str, tiled: bool) -> Any:
        """Scales by their block's place in the matrix as they are stored, and the other way round."""
        return grid if tiled == (way == "rowwise") else self.arrays.transpose(grid)

    def _mxfp8(self, x: Array, quantizer: Any, rowwise: bool, columnwise: bool) -> Iterator[Copy]:
        """``cast(x / 2^e)`` and the byte ``e + 127`` of each block of the matrix ``x``: the least ``2^e`` that is not below ``amax / fp8_max``."""
        fp8, tiled = fp8_format(quantizer.dtype), MXFP8.is_tiled(quantizer)

        def cast(block: Block) -> tuple[Any, Any]:
            exponent = self.exponent(self.amax(x, block), 1 / FP8_MAX[fp8])
            return self.arrays.fp8.encode(self.divided(x, exponent, block), fp8), exponent

        for way, data, grid in self._cast(cast, MXFP8, tiled, rowwise, columnwise):
            yield way, data, self.arrays.repeated(grid, MXFP8.length, 0 if way == "rowwise" else 1) if tiled else grid

    def _mxfp8_values(self, x: QuantizedTensor, way: str, scales: Array, shape: tuple[int, int], undo: bool) -> tuple[Any, None]:
        data = self.arrays.reshape(getattr(x, f"_{way}_data"), shape)
        return self.multiplied(self.arrays.fp8.decode(data, x._fp8_dtype), scales, MXFP8.block(way, False)), None

    def _cast(
        self, cast: Callable[[Block], tuple[Any, Any]], form: BlockFormat, tiled: bool, rowwise: bool, columnwise: bool
    ) -> Iterator[tuple[str, Any, Any]]:
        """The result of ``cast`` for each copy that is asked for; of tiles, the same one."""
        ways = [way for way, asked in (("rowwise", rowwise), ("columnwise", columnwise)) if asked]
        data, grid = cast(form.block(ways[0], tiled))
        for way in ways:
            if way != ways[0]:
                data, grid = (self.arrays.copy(data), grid) if tiled else cast(form.block(way, tiled))
            yield way, data, grid
