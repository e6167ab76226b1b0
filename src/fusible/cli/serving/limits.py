"""What a server grants at most."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fusible.errors import check_number

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """``max_tokens``: that a request may ask for (None: what the model's sequences hold). ``concurrency``: requests at once, those that wait
    included. ``queue_seconds``: until a request begins. ``request_seconds``: for the whole of it; what is there by then is its answer.
    ``grace_seconds``: for what runs when the server is told to end. ``body_bytes``: of a request, which has ``body_seconds`` to come."""

    max_tokens: int | None = None
    concurrency: int = 256
    queue_seconds: float = 60.0
    request_seconds: float = 600.0
    grace_seconds: float = 30.0
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                least = 1 if isinstance(field.default, int) or field.default is None else 0
                check_number(value, f"--{field.name.replace('_', '-')}", least=least)
