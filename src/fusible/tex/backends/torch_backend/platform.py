"""What belongs to NVIDIA's libraries: versions, communication, expert parallelism, distributed linear algebra."""

from __future__ import annotations

from fusible.tex.interface.platform import Platform

__all__ = ["PlatformKernels"]


class PlatformKernels(Platform):
    """What belongs to NVIDIA's libraries: versions, communication, expert parallelism, distributed linear algebra."""
