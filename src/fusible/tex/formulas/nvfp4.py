"""NVFP4: E2M1 in blocks of 16 with E4M3 scales, and an fp32 amax for the tensor or for each of its lines (NVIDIA 2025, arXiv:2509.25149).

A *line* is a row of the row-wise copy, a column of the column-wise one. The column-wise copy is that of the transposed tensor, or of its random
Hadamard transform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fusible.tex.enums import DType
from fusible.tex.formats import BlockCodec, Copy, NVFP4QuantizerLike
from fusible.tex.formulas.arrays import Array, Arrays, Function
from fusible.tex.formulas.number_formats import E2M1_MAX
from fusible.tex.interface.arguments import QuantizedTensor
from fusible.tex.protocol import FP8_MAX

__all__ = ["E4M3_MAX", "Nvfp4", "Random", "largest_value"]

E4M3_MAX = FP8_MAX[DType.kFloat8E4M3]

Random = Callable[[str, Any], Any]
"""``(way, lines)``: the random numbers in [0, 1) by which the lines of a copy are rounded stochastically."""


def largest_value(x: QuantizedTensor) -> float:
    """The largest number that a code times a block's scale stands for, to which the amax of a tensor ``x`` was mapped."""
    return E2M1_MAX * (x._nvfp4_e4m3_max if x._nvfp4_use_4over6 else E4M3_MAX)


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """What a framework does with the lines of a matrix."""

    arrays: Arrays
    amax: Function
    """``(x, across, quantizer)``: ``max |x|``, fp32: ``[1]``, or where the quantizer scales by lines of each, over the dimension ``across``."""
    cast: Function
    """``(way, lines, amax, quantizer, random)``: the codes of the lines, two to a byte, and E4M3 bytes, the scales of their blocks or tiles."""
    of_e4m3: Function
    """``(scales)``: the fp32 values of E4M3 bytes."""
    codes: Function
    """``(packed)``: the fp32 values of E2M1 codes, two to a byte."""
    scaled: Function
    """``(x, factors, block)``: an fp32 matrix, perhaps in the memory of ``x``, each block times its factor."""
    over: Function
    """``(x, divisor)``: the quotient by a number, rounded once."""
    hadamard: Function
    """``(quantizer)``: its matrix."""
    transformed: Function
    """``(x, matrix)``: the groups of 16 in the lines ``x`` times a matrix, in fp32."""
    some_at_a_time: Function
    """``(function, lines)``: ``function(lines)``, bf16 and of the same shape; perhaps for some of the lines at a time, as it holds many values."""

    def codec(self) -> BlockCodec:
        return BlockCodec(self._encode, self._values, self.transform)

    def _encode(
        self, x: Array, quantizer: Any, rowwise: bool, columnwise: bool, amaxes: dict[str, Any] | None = None, random: Random | None = None
    ) -> tuple[dict[str, Any], Iterator[Copy]]:
        """``amaxes`` and ``random``, where given, replace the matrix's own amaxes and the numbers that would be drawn."""
        amaxes = self._amaxes(x, quantizer, rowwise, columnwise) if amaxes is None else amaxes
        flat = {f"amax_{way}": amax if amax.ndim == 1 else self.arrays.reshape(amax, (-1,)) for way, amax in amaxes.items()}
        return flat, self._copies(x, quantizer, amaxes, random)

    def _amaxes(self, x: Array, quantizer: NVFP4QuantizerLike, rowwise: bool, columnwise: bool) -> dict[str, Any]:
        """``max |x|`` that each copy is scaled by."""
        amaxes = {"rowwise": self.amax(x, 1, quantizer)} if rowwise else {}
        if columnwise and quantizer.with_rht:
            amaxes["columnwise"] = self.amax(self.column_source(x, quantizer), 1, quantizer)
        elif columnwise:
            alike = rowwise and not quantizer.row_scaled_nvfp4
            amaxes["columnwise"] = self.arrays.copy(amaxes["rowwise"]) if alike else self.amax(x, 0, quantizer)
        return {way: self.arrays.fp8.reduced(amax, quantizer) for way, amax in amaxes.items()}

    def _copies(self, x: Array, quantizer: NVFP4QuantizerLike, amaxes: dict[str, Any], random: Random | None) -> Iterator[Copy]:
        """Of each copy that has an amax."""
        for way, amax in amaxes.items():
            lines = x if way == "rowwise" else self.column_source(x, quantizer)
            codes, scales = self.cast(way, lines, amax, quantizer, random)
            tiled = quantizer.with_2d_quantization and not quantizer.nvfp4_use_4over6
            yield way, codes, self._lines(scales, 16 if tiled else 1)

    def column_source(self, x: Array, quantizer: NVFP4QuantizerLike) -> Any:
        """``x`` transposed; where the quantizer asks for it, rounded to bfloat16 and transformed in groups of 16, in fp32, and rounded again."""
        lines = self.arrays.transpose(x)
        if not quantizer.with_rht:
            return lines
        return self.some_at_a_time(lambda some: self._by_pairs(some, self.hadamard(quantizer)), lines)

    def _by_pairs(self, lines: Array, matrix: Array) -> Any:
        """The groups of 16 in ``lines``, rounded to bfloat16, times a Hadamard matrix whose rows have signs, rounded so again: in fp32 sums and
        differences of elements whose places differ in the lowest bit, of these in the next, and so on (Fino and Algazi 1976,
        doi:10.1109/TC.1976.1674569). No zero has a sign."""
        xp, bf16 = self.arrays, self.arrays.dtype(DType.kBFloat16)
        groups = xp.reshape(xp.cast(xp.cast(lines, bf16), xp.float32), (-1, 16)) * xp.cast(matrix[:, 0], xp.float32)
        groups = xp.filled(groups, groups == 0.0, 0.0)
        for distance in (1, 2, 4, 8):
            pairs = xp.reshape(groups, (-1, 2, distance))
            groups = xp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1)
        return xp.cast(xp.reshape(groups, lines.shape), bf16)

    def e4m3(self, x: Array) -> Any:
        """The bytes of numbers >= 0, which saturate; NaN stays. Perhaps in the memory of ``x``."""
        return self.arrays.fp8.encode(x, DType.kFloat8E4M3)

    def transform(self, x: QuantizedTensor, way: str) -> Any | None:
        """The matrix that the groups of 16 in a copy of the tensor ``x`` were multiplied by, or None."""
        quantizer = x._quantizer
        return self.hadamard(quantizer) if way == "columnwise" and quantizer is not None and quantizer.with_rht else None

    def _values(self, x: QuantizedTensor, way: str, scales: Array, shape: tuple[int, int], undo: bool) -> tuple[Any, Any]:
        xp, count, width = self.arrays, *(shape if way == "rowwise" else (shape[1], shape[0]))
        values = self.scaled(self.codes(xp.reshape(getattr(x, f"_{way}_data"), (count, width // 2))), self.of_e4m3(scales), (1, 16))
        matrix = self.transform(x, way) if undo else None
        if matrix is not None:
            values = self.transformed(values, xp.permute(matrix, (1, 0)))
        return values if way == "rowwise" else xp.permute(values, (1, 0)), self.over(getattr(x, f"_amax_{way}"), largest_value(x))

    def better(self, base: Array, codes_by: Function, error_of: Function, high: int) -> tuple[Any, Any]:
        """Codes, and scales of each block's lines, with the block's amax mapped to 6 or, where the error is less, to 4 (Cook et al. 2025,
        arXiv:2512.02010). ``base``: scales for 6; ``codes_by(scales)``; ``error_of(codes, scales of lines)``: of the blocks of each line."""
        xp, candidates = self.arrays, []
        for factor in (1.0, 1.5):
            scales = self.e4m3(base * factor)
            codes = codes_by(scales)
            scales = self._lines(scales, high)
            candidates.append((codes, scales, self._of_tiles(error_of(codes, self.of_e4m3(scales)), high)))
        (six, scales_six, error_six), (four, scales_four, error_four) = candidates
        better = self._lines(error_four < error_six, high)
        blocks = (*better.shape, 16)
        codes = xp.where(better[:, :, None], xp.reshape(four, blocks), xp.reshape(six, blocks))
        return xp.reshape(codes, six.shape), xp.where(better, scales_four, scales_six)

    def _lines(self, grid: Array, high: int) -> Any:
        """One row per line, of tiles that are ``high`` lines."""
        return grid if high == 1 else self.arrays.repeated(grid, high, 0)

    def _of_tiles(self, error: Array, high: int) -> Any:
        """The sums of numbers per block over the lines of a tile, pairwise."""
        while high > 1:
            high //= 2
            halves = self.arrays.reshape(error, (-1, 2, high, error.shape[1]))
            error = self.arrays.reshape(halves[:, 0] + halves[:, 1], (-1, error.shape[1]))
        return error
