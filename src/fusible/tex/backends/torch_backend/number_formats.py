"""The small number formats that torch has no casts for: E8M0 scales, E2M1 elements, and the fp32 scale that follows from an amax.

Plain functions on tensors of any shape and device; everything is exact to the bit. Source: the OCP Microscaling Formats specification 1.0 (2023).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.arrays import TORCH
from fusible.tex.formulas.number_formats import E2M1, E2M1Codes

__all__ = [
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


def _sign_bit(x: Tensor) -> Tensor:
    return torch.signbit(x).logical_and_(x == x).view(torch.uint8).bitwise_left_shift_(3)  # none of NaN, which differs from itself


def decode_e2m1(code: Tensor) -> Tensor:
    """The fp32 values of E2M1 codes 0 to 15."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float32, device=code.device)
    return table.index_select(0, code.reshape(-1).int()).view(code.shape)


def _counted_down(below: Iterable[Tensor], like: Tensor) -> Tensor:
    code = torch.full_like(like, 7, dtype=torch.uint8)
    for each in below:
        code -= each.view(torch.uint8)
    return code


_CODES = E2M1Codes(TORCH, _counted_down, _sign_bit, decode_e2m1)
encode_e2m1, encode_e2m1_stochastically = _CODES.encode, _CODES.encode_stochastically


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
