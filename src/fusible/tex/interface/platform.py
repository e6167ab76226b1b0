"""What belongs to NVIDIA's libraries: versions, communication, expert parallelism, distributed linear algebra."""

from __future__ import annotations

__all__ = ["Platform"]


class Platform:
    """What belongs to NVIDIA's libraries: versions, communication, expert parallelism, distributed linear algebra."""
