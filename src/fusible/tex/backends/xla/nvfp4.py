"""NVFP4 on lazy tensors: E2M1 in blocks of 16 with E4M3 scales, and an fp32 amax for the tensor or for each of its lines (NVIDIA 2025,
arXiv:2509.25149).

A *line* is a row of the row-wise copy, a column of the column-wise one. The column-wise copy is that of the transposed tensor, or of its random
Hadamard transform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fusible import lazy
from fusible.errors import NotServedError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.blocks import block_amax, scale_blocks
from fusible.tex.backends.xla.fp8 import bits, magnitude, tensor_amax
from fusible.tex.backends.xla.number_formats import (
    E2M1_MAX,
    decode_e2m1,
    encode_e2m1,
    encode_e2m1_stochastically,
    pack_nibbles,
    reciprocal,
    settled,
    unpack_nibbles,
)
from fusible.tex.backends.xla.random import next_seed, uniform
from fusible.tex.formats import BlockCodec, Copy
from fusible.tex.protocol import FLT_MAX

__all__ = ["NVFP4_CODEC", "Random", "column_source"]

_E4M3_MAX = 448.0
_LIFTED = 2.0**64
"""The unit in which small tensors are scaled, as the inverse of their scale is subnormal: a whole number of 2^-149."""


Random = Callable[[str, Tensor], Tensor]
"""Of a copy and its lines the numbers in [0, 1) by which they are rounded stochastically."""


def _encode(
    x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool, amaxes: dict[str, Tensor] | None = None, random: Random | None = None
) -> tuple[dict[str, Tensor], Iterator[Copy]]:
    """``amaxes`` and ``random``, where given, are taken in the place of the matrix's own and of numbers that are drawn."""
    amaxes = _amaxes(x, quantizer, rowwise, columnwise) if amaxes is None else amaxes
    return {f"amax_{way}": lazy.reshape(amax, (-1,)) for way, amax in amaxes.items()}, _copies(x, quantizer, amaxes, random)


def _amaxes(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> dict[str, Tensor]:
    """``max |x|`` that each copy is scaled by, fp32 ``[1]`` or one per line."""
    if quantizer.with_amax_reduction:
        do = "reduce amaxes outside of the program"
        raise NotServedError(expected("no amax reduction", of="quantizing a lazy tensor", got="with_amax_reduction", do=do))
    amaxes = {}
    if rowwise:
        amaxes["rowwise"] = _amax(x, 1, quantizer)
    if columnwise:
        transformed = column_source(x, quantizer) if quantizer.with_rht else None
        amaxes["columnwise"] = _amax(x, 0, quantizer) if transformed is None else _amax(transformed, 1, quantizer)
    return amaxes


def _amax(x: Tensor, across: int, quantizer: Any) -> Tensor:
    return lazy.bitcast(lazy.max(magnitude(x), across), lazy.float32) if quantizer.row_scaled_nvfp4 else tensor_amax(x)


def _drawn(way: str, lines: Tensor) -> Tensor:
    counter = lazy.iota((lines.size,), 0, lazy.uint64)
    return lazy.reshape(uniform(next_seed(lines, "stochastic rounding"), counter), lines.shape)


def _copies(x: Tensor, quantizer: Any, amaxes: dict[str, Tensor], random: Random | None = None) -> Iterator[Copy]:
    """Codes, two to a byte, and E4M3 scales of each copy that has an amax: one, one per line, or ``[1, blocks]``, one per block along the lines."""
    for way, amax in amaxes.items():
        source = x if way == "rowwise" else column_source(x, quantizer)
        lines = lazy.cast(source, lazy.float32)
        numbers = (random or _drawn)(way, lines) if quantizer.stochastic_rounding else None
        codes, scales = _cast(lines, amax if amax.ndim == 2 else lazy.reshape(amax, (-1, 1)), quantizer, numbers)
        yield way, pack_nibbles(codes), scales


def column_source(x: Tensor, quantizer: Any) -> Tensor:
    """``x`` transposed; where the quantizer asks for it, rounded to bfloat16 and transformed in groups of 16: a product in fp32, rounded again."""
    lines = lazy.transpose(x, 0, 1)
    return lazy.cast(_transformed(lazy.cast(lines, lazy.bfloat16), _matrix(quantizer)), lazy.bfloat16) if quantizer.with_rht else lines


def _matrix(quantizer: Any) -> Tensor:
    matrix = quantizer.rht_matrix
    return matrix if isinstance(matrix, Tensor) else lazy.Tensor(matrix.float().numpy())


def _transformed(x: Tensor, matrix: Tensor) -> Tensor:
    groups = lazy.reshape(lazy.cast(x, lazy.float32), (-1, 16))
    return lazy.reshape(lazy.matmul(groups, lazy.cast(matrix, lazy.float32)), x.shape)


def _transform(x: Any, way: str) -> Tensor | None:
    """The matrix that the groups of 16 in a copy of the tensor ``x`` were multiplied by, or None."""
    quantizer = x._quantizer
    return _matrix(quantizer) if way == "columnwise" and quantizer is not None and quantizer.with_rht else None


def _values(x: Any, way: str, scales: Tensor, shape: tuple[int, int], undo: bool) -> tuple[Tensor, Tensor]:
    lines = shape if way == "rowwise" else (shape[1], shape[0])
    codes = unpack_nibbles(lazy.reshape(getattr(x, f"_{way}_data"), (lines[0], lines[1] // 2)))
    values = scale_blocks(decode_e2m1(codes), _decoded(scales), (1, 16))
    matrix = _transform(x, way) if undo else None
    if matrix is not None:
        values = _transformed(values, lazy.transpose(matrix, 0, 1))
    amax = getattr(x, f"_amax_{way}")
    largest = E2M1_MAX * (x._nvfp4_e4m3_max if x._nvfp4_use_4over6 else _E4M3_MAX)
    return values if way == "rowwise" else lazy.transpose(values, 0, 1), _over(amax, largest)


def _decoded(scales: Tensor) -> Tensor:
    return lazy.cast(lazy.bitcast(scales, lazy.float8), lazy.float32)


def _over(x: Tensor, divisor: float) -> Tensor:
    return x / settled(lazy.full(x.shape, divisor), lazy.abs(x))


def _cast(x: Tensor, amax: Tensor, quantizer: Any, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """The codes of the fp32 lines ``x`` and the E4M3 scales of their blocks; ``amax`` is ``[1, 1]``, one per line, or one per block along them."""
    over6, high = quantizer.nvfp4_use_4over6, 16 if quantizer.with_2d_quantization else 1
    scale = _global_scale(amax, quantizer.nvfp4_e4m3_max if over6 else _E4M3_MAX)
    small = bits(scale) >= 253 << 23
    unit = lazy.where(small, _LIFTED, 1.0)
    inverse = lazy.where(small, lazy.cast(bits(reciprocal(scale)), lazy.float32) * (2.0**-149 * _LIFTED), 1.0 / scale)
    alike = x.shape[0] // unit.shape[0], x.shape[1] // unit.shape[1]
    per_tile = high if amax.shape[0] > 1 else 1  # the lines of a tile have one amax
    numbers = (number[::per_tile] for number in (scale / unit, inverse, FLT_MAX / unit))
    lifted = _Lifted(scale_blocks(x, unit, alike), amax * unit, *numbers)
    largest = block_amax(lifted.x, (high, 16))
    if over6:
        return _four_over_six(x, amax, lifted, largest, high, quantizer)
    scales = _e4m3(largest * (lifted.scale * (1 / E2M1_MAX)))
    return _codes(lifted, scales, high, random), _lines(scales, high)


class _Lifted(NamedTuple):
    """Lines and their amax; of each block or tile its global scale, the inverse of that, and the largest number: all in the unit of the lines."""

    x: Tensor
    amax: Tensor
    scale: Tensor
    inverse: Tensor
    largest: Tensor


def _global_scale(amax: Tensor, e4m3_max: float) -> Tensor:
    """``S = min(e4m3_max * 6 / amax, FLT_MAX)``, or 1 where ``amax`` is 0 or infinite."""
    scale = lazy.minimum(e4m3_max * E2M1_MAX / amax, FLT_MAX)
    return lazy.where((bits(amax) == 0) | (scale == 0.0), 1.0, scale)


def _codes(lifted: _Lifted, scales: Tensor, high: int, random: Tensor | None = None) -> Tensor:
    """The E2M1 codes of the lines, each block times ``min(1 / (scale * (1 / S)), FLT_MAX)``."""
    factors = lazy.minimum(1.0 / (_decoded(scales) * lifted.inverse), lifted.largest)
    scaled = scale_blocks(lifted.x, factors, (high, 16))
    return encode_e2m1(scaled) if random is None else encode_e2m1_stochastically(scaled, random)


def _e4m3(x: Tensor) -> Tensor:
    """The bytes of numbers >= 0, which saturate; NaN stays."""
    return lazy.bitcast(lazy.cast(x, lazy.float8), lazy.uint8)


def _lines(grid: Tensor, high: int) -> Tensor:
    """One row per line, of tiles that are ``high`` lines."""
    if high == 1:
        return grid
    rows, blocks = grid.shape
    return lazy.reshape(lazy.broadcast_to(grid[:, None, :], (rows, high, blocks)), (rows * high, blocks))


def _four_over_six(x: Tensor, amax: Tensor, lifted: _Lifted, largest: Tensor, high: int, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Each block with its amax mapped to 6 or, where the error is less, to 4 (Cook et al. 2025, arXiv:2512.02010)."""
    base = _over(largest, E2M1_MAX) * lifted.scale
    squared = quantizer.nvfp4_4over6_err_mode == "MSE"
    measured = (x, amax) if squared else (lifted.x, lifted.amax)  # the squares of a small tensor's errors are 0
    candidates = []
    for stretch in (1.0, 1.5):
        scales = _e4m3(base * stretch)
        codes = _codes(lifted, scales, high)
        scales = _lines(scales, high)
        candidates.append((codes, scales, _error(*measured, codes, _decoded(scales), high, quantizer.nvfp4_e4m3_max, squared)))
    (six, scales_six, error_six), (four, scales_four, error_four) = candidates
    better = _lines(error_four < error_six, high)
    blocks = (*better.shape, 16)
    codes = lazy.where(better[:, :, None], lazy.reshape(four, blocks), lazy.reshape(six, blocks))
    return lazy.reshape(codes, x.shape), lazy.where(better, scales_four, scales_six)


def _error(x: Tensor, amax: Tensor, codes: Tensor, scales: Tensor, high: int, e4m3_max: int, squared: bool) -> Tensor:
    """The absolute or squared errors of each block, summed in the order of its elements, and of a tile's lines pairwise."""
    blocks = (*scales.shape, 16)
    amax = amax[:, :, None]
    value = settled(lazy.reshape(decode_e2m1(codes), blocks) * scales[:, :, None], amax)
    errors = lazy.abs(_over(settled(value * amax, amax), E2M1_MAX * e4m3_max) - lazy.reshape(x, blocks))
    if squared:
        errors = settled(errors * errors, amax)
    error = errors[:, :, 0]
    for place in range(1, 16):
        error = error + errors[:, :, place]
    while high > 1:
        high //= 2
        halves = lazy.reshape(error, (-1, 2, high, error.shape[1]))
        error = lazy.reshape(halves[:, 0] + halves[:, 1], (-1, error.shape[1]))
    return error


NVFP4_CODEC = BlockCodec(_encode, _values, _transform)
