"""Which sequence each token of packed sequences belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Segments"]


@dataclass(frozen=True, slots=True)
class Segments:
    """Per token (int32 ``[t]``): its sequence, the token's position there, the sequence's length; whether it is in one (bool); and where that begins,
    if anybody asks."""

    sequence: Any
    position: Any
    length: Any
    inside: Any
    start: Any = None
