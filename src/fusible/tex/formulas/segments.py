"""Which sequence each token of packed sequences belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["Segments"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Segments(Generic[T]):
    """Per token (int32 ``[t]``): its sequence, the token's position there, the sequence's length; whether it is in one (bool); and where that begins,
    if anybody asks."""

    sequence: T
    position: T
    length: T
    inside: T
    start: Any = None
