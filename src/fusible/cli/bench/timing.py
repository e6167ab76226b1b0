"""Timing several functions side by side."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

__all__ = ["side_by_side", "using_threads"]

_WARM_UP, _WARM_UP_AT_LEAST, _WARM_UP_SECONDS = 5, 3, 1.0
"""Calls before the first timed one: the first call of a pass plans it, the second records it, and from the third on it is replayed."""
_SECONDS_IN_ALL = 20.0
"""What a function's turns may take; one that needs longer has fewer of them, and at least three."""


def side_by_side(functions: Mapping[str, Callable[[], object]], *, rounds: int = 30, seconds: float = 0.01) -> dict[str, float]:
    """The median time of one call of each function, in seconds.

    The functions take turns, ``rounds`` times, each for about ``seconds`` at a time, so that other work on the machine slows all of them alike. Of a
    call that takes seconds, fewer rounds have to do.
    """
    warm = {name: max(_warm_up(function), 1e-7) for name, function in functions.items()}
    counts = {name: max(1, int(seconds / taken)) for name, taken in warm.items()}
    turns = {name: max(3, int(_SECONDS_IN_ALL / max(taken, seconds))) for name, taken in warm.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for name, function in functions.items():
                if turn >= turns[name]:
                    continue
                count = counts[name]
                start = time.perf_counter()
                for _ in range(count):
                    function()
                times[name].append((time.perf_counter() - start) / count)
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Let torch have ``count`` threads. The native kernels follow torch, whose runtime they share."""
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def _warm_up(function: Callable[[], object]) -> float:
    """Call the function some times; the seconds of the last call."""
    began = start = time.perf_counter()
    for call in range(_WARM_UP + 1):
        start = time.perf_counter()
        function()
        if call + 1 >= _WARM_UP_AT_LEAST and time.perf_counter() - began > _WARM_UP_SECONDS:
            break
    return time.perf_counter() - start
