"""The small number formats as lazy tensors: E8M0 scales, E2M1 elements, powers of two and reciprocals.

XLA takes subnormals for zero where it computes, even in a conversion of float64, so what may be one is put together from its bits.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.arrays import LAZY
from fusible.tex.backends.xla.fp8 import bits, magnitude, positive_and_finite
from fusible.tex.formulas.number_formats import E2M1Codes

__all__ = [
    "barrier",
    "decode_e2m1",
    "encode_e2m1",
    "encode_e2m1_stochastically",
    "encode_e8m0",
    "pack_nibbles",
    "reciprocal",
    "scale_of_amax",
    "times_power_of_two",
    "unpack_nibbles",
]

_INFINITE, _BIAS = 0x7F800000, 127


def barrier(x: Tensor, nonnegative: Tensor) -> Tensor:
    """``x`` (fp32) behind a step that XLA does not see through: it adds the sign bits of a tensor of numbers >= 0.

    XLA divides by a number that is known, or the same for all, by multiplying with its reciprocal; it changes the order of products, and adds a
    product unrounded. Not across this step.
    """
    return lazy.bitcast(bits(x) + lazy.shift_right_logical(bits(nonnegative), 31), lazy.float32)


def reciprocal(x: Tensor) -> Tensor:
    """``1 / x`` of fp32 numbers > 0, correctly rounded, subnormal results included."""
    # 2^127 < x <= FLT_MAX: 2^149 / x is the result in units of the least subnormal, and adding 2^52 rounds it to a whole number.
    units = lazy.full((), 2.0**149, lazy.float64) / lazy.cast(x, lazy.float64) + 2.0**52
    subnormal = lazy.cast(lazy.bitcast(units, lazy.uint64) & 0xFFFFFFFF, lazy.uint32)
    exponent = lazy.shift_right_logical(bits(x), 23)
    return lazy.where((exponent >= 253) & (exponent < 255), lazy.bitcast(subnormal, lazy.float32), 1.0 / x)


def times_power_of_two(x: Tensor, exponent: Tensor) -> Tensor:
    """``x * 2^exponent``, ``exponent`` int32 from -252 to 252: in two steps, so that no factor is subnormal."""
    half = lazy.bitcast(lazy.shift_right_logical(lazy.bitcast(exponent + 256, lazy.uint32), 1), lazy.int32) - 128
    return x * _power_of_two(half) * _power_of_two(exponent - half)


def _power_of_two(exponent: Tensor) -> Tensor:
    return lazy.bitcast(lazy.bitcast(exponent + _BIAS, lazy.uint32) << 23, lazy.float32)


def scale_of_amax(amax: Tensor, largest: float, epsilon: float, power_of_two: bool, where_infinite: float) -> Tensor:
    """The fp32 scale that takes ``amax`` (fp32) to ``largest``: ``largest / max(amax, epsilon)``; 1 for an amax that is 0, infinite or NaN; with
    ``power_of_two`` the power of two below; ``where_infinite`` where the quotient overflows."""
    if epsilon:
        amax = lazy.where(amax < epsilon, epsilon, amax)
    scale = largest / amax
    scale = lazy.where(bits(scale) == _INFINITE, where_infinite, scale)
    if power_of_two:
        scale = lazy.bitcast(bits(scale) & _INFINITE, lazy.float32)
    return lazy.where(positive_and_finite(amax), scale, 1.0)


def encode_e8m0(amax: Tensor, factor: float) -> Tensor:
    """The exponent byte of ``amax * factor`` (fp32 >= 0), rounded up to a power of two: 0 for 0, 0xFE for infinity, 0xFF for NaN."""
    # A product that may be subnormal is taken 2^64 times as large.
    small = bits(amax) < (64 + 23) << 23
    product = bits(lazy.where(small, amax * 2.0**64, amax) * factor)
    carried = lazy.shift_right_logical(product + 0x7FFFFF, 23)  # any mantissa bit carries into the exponent
    code = lazy.where(small, lazy.where(carried > 64, carried - 64, 0), lazy.minimum(carried, 0xFE))
    return lazy.cast(lazy.where(bits(amax) > _INFINITE, 0xFF, code), lazy.uint8)


def _sign_bit(x: Tensor) -> Tensor:
    sign = lazy.shift_right_logical(bits(x), 28) & 8
    return lazy.cast(lazy.where(magnitude(x) > _INFINITE, 0, sign), lazy.uint8)  # none of NaN


def decode_e2m1(code: Tensor) -> Tensor:
    """The fp32 values of E2M1 codes 0 to 15."""
    wide = lazy.cast(code, lazy.uint32)
    size = wide & 7
    found = lazy.where(size < 2, size * 0x3F000000, (size + 252) << 22)  # 0 and 1/2; else exponent and mantissa, in fp32's place and bias
    return lazy.bitcast(found | ((wide & 8) << 28), lazy.float32)


def _counted_down(below: Iterable[Tensor], like: Tensor) -> Tensor:
    code = lazy.full(like.shape, 7, lazy.uint8)
    for each in below:
        code = code - lazy.cast(each, lazy.uint8)
    return code


_CODES = E2M1Codes(LAZY, _counted_down, _sign_bit, decode_e2m1)
encode_e2m1, encode_e2m1_stochastically = _CODES.encode, _CODES.encode_stochastically


def pack_nibbles(code: Tensor) -> Tensor:
    """``[..., 2 n]`` codes below 16 -> ``[..., n]`` bytes; the low nibble is the even column's."""
    pairs = lazy.reshape(code, (*code.shape[:-1], code.shape[-1] // 2, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """``[..., n]`` bytes -> ``[..., 2 n]`` codes: the inverse of ``pack_nibbles``."""
    pairs = lazy.stack([packed & 0xF, lazy.shift_right_logical(packed, 4)], -1)
    return lazy.reshape(pairs, (*packed.shape[:-1], 2 * packed.shape[-1]))
