"""Counter-based random words: the same bits from every backend.

The word of ``(seed, counter)``, both 64-bit integers (arithmetic modulo 2^64, ``>>>`` a logical shift, ``rotate`` by 32 bits), is

    z = seed + 0x9E3779B97F4A7C15
    z = (z ^ (z >>> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >>> 27)) * 0x94D049BB133111EB
    key = (z ^ (z >>> 31)) | 1                      SplitMix64 (Steele et al. 2014), made odd
    y = counter * key
    x = rotate(y * y + y)
    x = rotate(x * x + y + key)
    x = rotate(x * x + y)
    t = x * x + y + key
    word = t >>> 32                                 Squares32, four rounds (Widynski 2020, arXiv:2004.06278)
    x = rotate(t)
    long word = t ^ ((x * x + y) >>> 32)            Squares64, five

integers in [0, 2^32) and [0, 2^64). An element is kept by dropout of probability p where its word is at least ``floor(p * 2^32)``. Where rounding
is stochastic, four elements share a long word, whose counter is a fourth of the first one's number: its lowest 16 bits ``h`` are the first one's,
and so on, and the element's random number is ``(h + 1/2) * 2^-16``.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["keys", "uniform", "words"]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """The logical right shift: torch's own keeps the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def keys(seed: Tensor) -> Tensor:
    """The key of each seed (int64)."""
    z = seed + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shift(z, 31)) | 1


def words(seed: Tensor, counter: Tensor) -> Tensor:
    """The random word of each counter (int64) under ``seed`` (int64 ``[1]``): int64 values in [0, 2^32)."""
    return _shift(_four_rounds(seed, counter)[0], 32)


def _long_words(seed: Tensor, counter: Tensor) -> Tensor:
    """The long word of each counter, as int64."""
    found, y = _four_rounds(seed, counter)
    x = _rotate(found)
    return found.bitwise_xor_(_shift(torch.addcmul(y, x, x), 32))


def _four_rounds(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
    """What four rounds leave, and the products of counters and key."""
    key = keys(seed)
    y = counter * key
    z = y + key
    x = _rotate(torch.addcmul(y, y, y))
    x = _rotate(torch.addcmul(z, x, x))
    x = _rotate(torch.addcmul(y, x, x))
    return torch.addcmul(z, x, x), y


def _rotate(x: Tensor) -> Tensor:
    return _shift(x, 32).bitwise_or_(x << 32)


def uniform(seed: Tensor, first: int, shape: torch.Size) -> Tensor:
    """fp32 numbers in (0, 1), ``shape``: those of the elements from number ``first`` on. Both are whole fours."""
    found = torch.empty(shape, dtype=torch.float32, device=seed.device)
    counter = first // 4
    # In parts where it is large: a word takes many bytes to work out.
    for part in found.view(-1, 4).split(max(found.numel() // 128, 4096)):
        drawn = _long_words(seed, torch.arange(counter, counter + len(part), device=seed.device))
        quarters = torch.stack([_shift(drawn, shift) if shift else drawn for shift in (0, 16, 32, 48)], 1).bitwise_and_(0xFFFF)
        torch.mul(quarters.float().add_(0.5), 2.0**-16, out=part)  # of integers the product would be of the default dtype
        counter += len(part)
    return found
