"""Counter-based random words, bit for bit those that ``tex.prim.dropout`` documents: Squares32 under a SplitMix64 key.

All arithmetic is on uint64, where it wraps as the algorithms want it.
"""

from __future__ import annotations

from fusible import lazy
from fusible.lazy import Tensor

__all__ = ["drop_threshold", "words"]


def _mixed(z: Tensor, shift: int, factor: int) -> Tensor:
    return (z ^ lazy.shift_right_logical(z, shift)) * factor


def _key(seed: Tensor) -> Tensor:
    """SplitMix64 of the seed (Steele et al. 2014), made odd."""
    z = _mixed(seed + 0x9E3779B97F4A7C15, 30, 0xBF58476D1CE4E5B9)
    z = _mixed(z, 27, 0x94D049BB133111EB)
    return (z ^ lazy.shift_right_logical(z, 31)) | 1


def _rotate(x: Tensor) -> Tensor:
    return lazy.shift_right_logical(x, 32) | (x << 32)


def words(seed: Tensor, counter: Tensor) -> Tensor:
    """The random word of each counter (uint64) under ``seed`` (int64 ``[1]``): uint64 values in [0, 2^32) (Widynski 2020, arXiv:2004.06278)."""
    key = _key(lazy.bitcast(seed, lazy.uint64))
    y = counter * key
    z = y + key
    x = _rotate(y * y + y)
    x = _rotate(x * x + z)
    x = _rotate(x * x + y)
    return lazy.shift_right_logical(x * x + z, 32)


def drop_threshold(probability: float) -> int:
    """Words below this are dropped: exactly ``probability`` of them, to 2^-32."""
    return int(probability * (1 << 32))
