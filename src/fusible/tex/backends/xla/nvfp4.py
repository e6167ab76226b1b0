"""NVFP4 on lazy tensors."""

from __future__ import annotations

from typing import NamedTuple

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.arrays import LAZY, fp32
from fusible.tex.backends.xla.blocks import block_amax, scale_blocks
from fusible.tex.backends.xla.fp8 import bits, magnitude, tensor_amax
from fusible.tex.backends.xla.number_formats import (
    barrier,
    decode_e2m1,
    encode_e2m1,
    encode_e2m1_stochastically,
    pack_nibbles,
    reciprocal,
    unpack_nibbles,
)
from fusible.tex.backends.xla.random import next_seed, uniform
from fusible.tex.formats import NVFP4QuantizerLike
from fusible.tex.formulas.number_formats import E2M1_MAX
from fusible.tex.formulas.nvfp4 import E4M3_MAX, Nvfp4, Random
from fusible.tex.protocol import FLT_MAX

__all__ = ["NVFP4_CODEC", "column_source", "hadamard"]

_LIFTED = 2.0**64
"""The unit in which small tensors are scaled, as the inverse of their scale is subnormal: a whole number of 2^-149."""


def _amax(x: Tensor, across: int, quantizer: NVFP4QuantizerLike) -> Tensor:
    return lazy.bitcast(lazy.max(magnitude(x), across), lazy.float32) if quantizer.row_scaled_nvfp4 else tensor_amax(x)


def _drawn(way: str, lines: Tensor) -> Tensor:
    fours = lazy.iota((lines.size // 4,), 0, lazy.uint64)
    return lazy.reshape(uniform(next_seed(lines, "stochastic rounding"), fours), lines.shape)


def hadamard(quantizer: NVFP4QuantizerLike) -> Tensor:
    """The matrix of a quantizer's random Hadamard transform."""
    matrix = quantizer.rht_matrix
    return matrix if isinstance(matrix, Tensor) else Tensor(matrix.float().numpy())


def _transformed(x: Tensor, matrix: Tensor) -> Tensor:
    return lazy.reshape(lazy.matmul(lazy.reshape(fp32(x), (-1, 16)), fp32(matrix)), x.shape)


def _decoded(scales: Tensor) -> Tensor:
    return fp32(lazy.bitcast(scales, lazy.float8))


def _over(x: Tensor, divisor: float) -> Tensor:
    return x / barrier(lazy.full(x.shape, divisor), lazy.abs(x))


def _cast(way: str, source: Tensor, amax: Tensor, quantizer: NVFP4QuantizerLike, random: Random | None) -> tuple[Tensor, Tensor]:
    """``amax`` is one, one per line, or ``[1, blocks]``, one per block along the lines."""
    x, amax = fp32(source), amax if amax.ndim == 2 else lazy.reshape(amax, (-1, 1))
    numbers = (random or _drawn)(way, x) if quantizer.stochastic_rounding else None
    over6, high = quantizer.nvfp4_use_4over6, 16 if quantizer.with_2d_quantization else 1
    scale = _global_scale(amax, quantizer.nvfp4_e4m3_max if over6 else E4M3_MAX)
    small = bits(scale) >= 253 << 23
    unit = lazy.where(small, _LIFTED, 1.0)
    inverse = lazy.where(small, lazy.cast(bits(reciprocal(scale)), lazy.float32) * (2.0**-149 * _LIFTED), 1.0 / scale)
    alike = x.shape[0] // unit.shape[0], x.shape[1] // unit.shape[1]
    per_tile = high if amax.shape[0] > 1 else 1  # the lines of a tile have one amax
    tiles = (number[::per_tile] for number in (scale / unit, inverse, FLT_MAX / unit))
    lifted = _Lifted(scale_blocks(x, unit, alike), amax * unit, *tiles)
    largest = block_amax(lifted.x, (high, 16))
    if over6:
        codes, scales = _four_over_six(x, amax, lifted, largest, high, quantizer)
        return pack_nibbles(codes), scales
    scales = _NVFP4.e4m3(largest * (lifted.scale * (1 / E2M1_MAX)))
    return pack_nibbles(_codes(lifted, scales, high, numbers)), scales


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


def _four_over_six(x: Tensor, amax: Tensor, lifted: _Lifted, largest: Tensor, high: int, quantizer: NVFP4QuantizerLike) -> tuple[Tensor, Tensor]:
    squared = quantizer.nvfp4_4over6_err_mode == "MSE"
    measured = (x, amax) if squared else (lifted.x, lifted.amax)  # the squares of a small tensor's errors are 0
    return _NVFP4.better(
        _over(largest, E2M1_MAX) * lifted.scale,
        lambda scales: _codes(lifted, scales, high),
        lambda codes, scales: _error(*measured, codes, scales, quantizer.nvfp4_e4m3_max, squared),
        high,
    )


def _error(x: Tensor, amax: Tensor, codes: Tensor, scales: Tensor, e4m3_max: int, squared: bool) -> Tensor:
    """The absolute or squared errors of each block, summed in the order of its elements."""
    blocks = (*scales.shape, 16)
    amax = amax[:, :, None]
    value = barrier(lazy.reshape(decode_e2m1(codes), blocks) * scales[:, :, None], amax)
    errors = lazy.abs(_over(barrier(value * amax, amax), E2M1_MAX * e4m3_max) - lazy.reshape(x, blocks))
    if squared:
        errors = barrier(errors * errors, amax)
    error = errors[:, :, 0]
    for place in range(1, 16):
        error = error + errors[:, :, place]
    return error


_NVFP4 = Nvfp4(
    arrays=LAZY,
    amax=_amax,
    cast=_cast,
    of_e4m3=_decoded,
    codes=lambda packed: decode_e2m1(unpack_nibbles(packed)),
    scaled=scale_blocks,
    over=_over,
    hadamard=hadamard,
    transformed=_transformed,
    some_at_a_time=lambda function, lines: function(lines),
)
NVFP4_CODEC, column_source = _NVFP4.codec(), _NVFP4.column_source
