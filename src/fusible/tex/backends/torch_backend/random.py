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
    word = (x * x + y + key) >>> 32                 Squares32, four rounds (Widynski 2020, arXiv:2004.06278)

an integer in [0, 2^32). An element is kept by dropout of probability p where its word is at least ``floor(p * 2^32)``; where rounding is stochastic,
its number is that of the word's upper 24 bits, in units of 2^-24.
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
    key = keys(seed)
    y = counter * key
    z = y + key
    x = _rotate(torch.addcmul(y, y, y))
    x = _rotate(torch.addcmul(z, x, x))
    x = _rotate(torch.addcmul(y, x, x))
    return _shift(torch.addcmul(z, x, x), 32)


def _rotate(x: Tensor) -> Tensor:
    return _shift(x, 32).bitwise_or_(x << 32)


def uniform(seed: Tensor, first: int, shape: torch.Size) -> Tensor:
    """fp32 numbers in [0, 1), ``shape``: those of the counters from ``first`` on."""
    found = torch.empty(shape, dtype=torch.float32, device=seed.device)
    # In parts where it is large: a word takes many bytes to work out.
    for part in found.view(-1).split(max(found.numel() // 32, 4096)):
        drawn = words(seed, torch.arange(first, first + part.numel(), device=seed.device)) >> 8
        torch.mul(drawn.float(), 2.0**-24, out=part)  # of integers the product would be of the default dtype
        first += part.numel()
    return found
