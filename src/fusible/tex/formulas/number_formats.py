"""E2M1 (OCP Microscaling Formats specification 1.0, 2023): 0, 1/2, 1, 3/2, 2, 3, 4, 6 and their negatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fusible.tex.formulas.arrays import Array, Arrays, Function

__all__ = ["E2M1", "E2M1Codes", "E2M1_MAX"]

E2M1_MAX = 6.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_UP = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbours: every second one rounds up, to the even code."""


@dataclass(frozen=True, slots=True)
class E2M1Codes:
    """How a framework encodes fp32 values as E2M1: one code a byte."""

    arrays: Arrays
    counted_down: Function
    """``(below, like)``: uint8 of the shape of ``like``: 7 minus the number of conditions in ``below`` that hold. The conditions come one by one."""
    sign_bit: Function
    """``(x)``: uint8, 8 where ``x`` has a sign and is a number."""
    decode: Function
    """``(code)``: fp32."""

    def encode(self, x: Array) -> Any:
        """The codes (bit 3 the sign) of fp32 values: rounded to the nearest, ties to the even code, saturating at 6; NaN becomes 6."""
        size = self.arrays.abs(x)
        return self.counted_down(_below(size), x) | self.sign_bit(x)

    def encode_stochastically(self, x: Array, random: Array) -> Any:
        """The codes of fp32 values rounded to one of their two neighbours: up in size with the probability that makes the mean ``|x|``.

        ``random``: fp32 in [0, 1), of the shape of ``x``. What E2M1 holds stays as it is, what lies above 6 becomes 6, and NaN too.
        """
        xp = self.arrays
        size = xp.abs(x)
        code = self.counted_down((size < value for value in E2M1[1:]), x)
        lower = self.decode(code)
        # The distance to the next value is a power of two, and the difference is exact, so that the quotient is.
        place = xp.times(xp.minus(size, lower), xp.hidden(xp.where(lower < 4.0, 1.0, 0.5), lower >= 2.0, 2.0))
        up = (random < place) & (code < 7)
        return (code + xp.cast(up, code.dtype)) | self.sign_bit(x)


def _below(size: Array) -> Iterator[Any]:
    for lower, threshold in enumerate(_UP):
        yield size < threshold if lower % 2 else size <= threshold
