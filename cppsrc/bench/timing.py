"""Timing two or more functions in turn, for the scripts of this folder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

__all__ = ["medians"]


def medians(*functions: Callable[[], object], rounds: int = 21, alone: bool = False) -> list[float]:
    """Milliseconds of each function, called in turn: the median after three rounds of warming up; ``alone``, the least CPU time of this thread."""
    clock = time.thread_time if alone else time.perf_counter
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, taken in zip(functions, times, strict=True):
            start = clock()
            function()
            taken.append(1e3 * (clock() - start))
    return [min(taken) if alone else statistics.median(taken[3:]) for taken in times]
