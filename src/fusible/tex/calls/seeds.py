"""Seeds for kernels that round at random. Each kernel draws one seed for every tensor, and its numbers are the counter-based words under that seed.

In eager execution a seed comes from torch's default generator when the kernel runs. A recorded program gets placeholders instead (``supplying``), and
as many seeds are drawn for each of its runs. So both draw the same seeds, in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["draw_seeds", "drop_threshold", "supplied_seed", "supplying"]


class _Local(threading.local):
    supply: Callable[[], Any] | None = None


_local = _Local()


def draw_seeds(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """``count`` seeds, int64, from torch's generator of the device."""
    return torch.empty(count, dtype=torch.int64, device=device).random_()


def supplied_seed() -> Any:
    """The placeholder of the next seed (int64 ``[1]``) of the program that this thread records, or None where it records none."""
    return None if _local.supply is None else _local.supply()


@contextmanager
def supplying(supply: Callable[[], Any]) -> Iterator[None]:
    """Take seeds from ``supply`` while the context is open."""
    former = _local.supply
    _local.supply = supply
    try:
        yield
    finally:
        _local.supply = former


def drop_threshold(probability: float) -> int:
    """Words below this are dropped: exactly ``probability`` of them, to 2^-32."""
    return int(probability * (1 << 32))
