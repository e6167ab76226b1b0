"""Random words in Python's integers."""

from __future__ import annotations

__all__ = ["squares"]

_MASK = (1 << 64) - 1


def squares(seed: int, count: int, bits: int = 32) -> list[int]:
    """The first words of 32 or 64 ``bits`` under a seed: Squares32 or Squares64 (Widynski 2020, arXiv:2004.06278), whose key SplitMix64 makes."""
    z = (seed + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    key = (z ^ (z >> 31)) | 1
    words: list[int] = []
    for counter in range(count):
        x = y = (counter * key) & _MASK
        z = (y + key) & _MASK
        for addend in (y, z, y):
            x = (x * x + addend) & _MASK
            x = (x >> 32) | ((x << 32) & _MASK)
        word = (x * x + z) & _MASK
        x = (word >> 32) | ((word << 32) & _MASK)
        words.append(word >> 32 if bits == 32 else word ^ (((x * x + y) & _MASK) >> 32))
    return words
