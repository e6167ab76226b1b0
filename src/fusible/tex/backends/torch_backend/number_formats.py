"""The small number formats that torch has no casts for: E8M0 scales, E2M1 elements, and the fp32 scale that follows from an amax.

Plain functions on tensors of any shape and device; everything is exact to the bit. Source: the OCP Microscaling Formats specification 1.0 (2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "E2M1_MAX",
    "decode_e2m1",
    "decode_e2m1_pairs",
    "decode_e8m0",
    "encode_e2m1",
    "encode_e2m1_stochastically",
    "encode_e8m0",
    "factor_of_e8m0",
    "pack_nibbles",
    "scale_of_amax",
    "unpack_nibbles",
]

E2M1_MAX = 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_UP = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbours: every second one rounds up, to the even code."""


def scale_of_amax(amax: Tensor, largest: float, epsilon: float, power_of_two: bool, where_infinite: float) -> Tensor:
    """The fp32 scale that takes ``amax`` (fp32) to ``largest``: ``largest / max(amax, epsilon)``; 1 for an amax that is 0, infinite or NaN; with
    ``power_of_two`` the power of two below; ``where_infinite`` where the quotient overflows."""
    amax = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    scale = torch.full_like(amax, largest) / amax  # a number over a tensor would be its reciprocal times the number, rounded twice
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, where_infinite), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(torch.isfinite(amax) & (amax != 0), scale, torch.ones_like(scale))


def encode_e8m0(x: Tensor) -> Tensor:
    """The exponent byte of fp32 values >= 0, rounded up to a power of two: 0 for 0, 0xFE for infinity and what lies above 2^127, 0xFF for NaN."""
    bits = x.view(torch.int32)
    code = bits.add(0x7FFFFF).bitwise_right_shift_(23).clamp_max_(0xFE)  # any mantissa bit carries into the exponent
    return code.masked_fill_(bits <= 0x400000, 0).masked_fill_(torch.isnan(x), 0xFF).to(torch.uint8)


def decode_e8m0(code: Tensor) -> Tensor:
    """``2^(code - 127)`` as fp32, the subnormal 2^-127 included; NaN for 0xFF."""
    wide = code.to(torch.int32)
    bits = torch.where(wide == 0, 0x00400000, torch.where(wide == 0xFF, 0x7FC00000, wide << 23))
    return bits.to(torch.int32).view(torch.float32)


def factor_of_e8m0(code: Tensor) -> Tensor:
    """``2^(127 - code)`` as fp32, by which a value is multiplied before it is cast: 2^-127 for 0xFE, NaN for 0xFF."""
    wide = code.to(torch.int32)
    bits = torch.where(wide == 0xFE, 0x00400000, torch.where(wide == 0xFF, 0x7FC00000, (254 - wide) << 23))
    return bits.to(torch.int32).view(torch.float32)


def encode_e2m1(x: Tensor) -> Tensor:
    """The E2M1 codes (uint8, bit 3 the sign) of fp32 values: rounded to the nearest, ties to the even code, saturating at 6; NaN becomes 6."""
    size = x.abs()
    code = torch.full_like(x, 7, dtype=torch.uint8)
    for lower, threshold in enumerate(_E2M1_UP):
        code -= (size < threshold if lower % 2 else size <= threshold).view(torch.uint8)
    return code.bitwise_or_(_sign_bit(x))


def encode_e2m1_stochastically(x: Tensor, random: Tensor) -> Tensor:
    """The E2M1 codes of fp32 values rounded to one of their two neighbours: up in size with the probability that makes the mean ``|x|``.

    ``random``: fp32 in [0, 1), of the shape of ``x``. What E2M1 holds stays as it is, what lies above 6 becomes 6, and NaN too.
    """
    size = x.abs()
    code = torch.full_like(x, 7, dtype=torch.uint8)
    for value in _E2M1[1:]:
        code -= (size < value).view(torch.uint8)
    lower = decode_e2m1(code)
    # The distance to the next value is a power of two, and the difference is exact, so that the quotient is.
    size.sub_(lower).div_(torch.where(lower < 4, 1.0, 2.0).masked_fill_(lower < 2, 0.5))
    up = (random < size).logical_and_(code < 7)
    return code.add_(up.view(torch.uint8)).bitwise_or_(_sign_bit(x))


def _sign_bit(x: Tensor) -> Tensor:
    return torch.signbit(x).logical_and_(x == x).view(torch.uint8).bitwise_left_shift_(3)  # none of NaN, which differs from itself


def decode_e2m1(code: Tensor) -> Tensor:
    """The fp32 values of E2M1 codes 0 to 15."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device=code.device)
    return table.index_select(0, code.reshape(-1).int()).view(code.shape)


def decode_e2m1_pairs(packed: Tensor) -> Tensor:
    """``[..., n]`` bytes -> ``[..., 2 n]`` fp32 values of the E2M1 codes in them: one look-up per byte."""
    table = decode_e2m1(unpack_nibbles(torch.arange(256, dtype=torch.uint8, device=packed.device)).view(256, 2))
    values = table.index_select(0, packed.reshape(-1).int())
    return values.view(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_nibbles(code: Tensor) -> Tensor:
    """``[..., 2 n]`` codes below 16 -> ``[..., n]`` bytes; the low nibble is the even column's."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """``[..., n]`` bytes -> ``[..., 2 n]`` codes: the inverse of ``pack_nibbles``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
