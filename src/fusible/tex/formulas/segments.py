"""Which sequence each token of packed sequences belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["Segments"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Segments(Generic[T]):
    """Per token, int32 ``[t]``: its sequence, its position in that sequence, the sequence's length, and ``inside``, bool: whether it is in a sequence
    at all. ``start``: where the sequence begins, or None where it was not computed."""

    sequence: T
    position: T
    length: T
    inside: T
    start: Any = None
