"""A description of the machine, and the best rates measured on it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusible import tex
from fusible.cli.bench.fp8 import fp8, product
from fusible.cli.info import native_kernels
from fusible.machine import cpu_model, installed_memory

__all__ = ["Bound", "Limits", "describe_machine", "measure_limits"]

_OVERHEAD_BELOW = 100e-6
_LONG_ENOUGH = 3.0
"""Seconds after which a product that is slow here need not be called again."""


def describe_machine() -> dict[str, Any]:
    """A description of this machine, as an object of JSON.

    ``level``: of the native kernels, or None where there are none; ``torch_level``: torch's own. ``load``: how many processes wanted a core over the
    last minute, or None.
    """
    native = native_kernels()
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "memory_bytes": installed_memory() or None,
        "threads": torch.get_num_threads(),
        "native_threads": native.get("threads"),
        "level": native.get("level"),
        "torch": torch.__version__,
        "torch_level": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


@dataclass(frozen=True)
class Bound:
    """What limits a figure: ``by`` is "products" (GFLOP/s), "bandwidth" (GB/s) or "overhead" (us).

    ``share``: the part of the machine's limit that is reached; None for overhead.
    """

    by: str
    rate: float
    share: float | None


@dataclass(frozen=True)
class Limits:
    """The highest rates measured here: billions of operations a second of a matrix product, billions of bytes a second read from memory."""

    gflops: float
    gbytes: float

    def bound(self, seconds: float, flops: float, nbytes: float) -> Bound:
        """What bounds a call of ``seconds`` that does ``flops`` and moves ``nbytes``: whichever of the two would take longer at the limit.

        A share of the bandwidth above 1 means that caches served the call. A call of less than 100 us that takes more than twice as long as the
        limits allow is bound by overhead: the time beyond them.
        """
        computing, moving = flops / self.gflops / 1e9, nbytes / self.gbytes / 1e9
        least = max(computing, moving)
        if seconds < _OVERHEAD_BELOW and seconds > 2 * least:
            return Bound("overhead", (seconds - least) * 1e6, None)
        if computing >= moving:
            return Bound("products", flops / seconds / 1e9, computing / seconds)
        return Bound("bandwidth", nbytes / seconds / 1e9, moving / seconds)


def measure_limits(quick: bool) -> Limits:
    """The best of several ways: products of ``n^3`` by torch and by Fusible, in the dtypes that each is fast at; sums over more than caches hold."""
    sizes, count, seconds = ((128,), 2**18, 0.0) if quick else ((1024, 2048), 2**27, 0.7)
    gflops = max(2e-9 * n**3 / _best(call, seconds) for n in sizes for call in _products(n))
    x, flag = torch.ones(count), torch.zeros(1, dtype=torch.int32)
    readers: list[Callable[[], object]] = [x.sum, x.amax, lambda: tex.multi_tensor_l2norm(0, flag, [[x]], False)]
    return Limits(gflops, max(1e-9 * x.nbytes / _best(call, seconds) for call in readers))


def _products(n: int) -> list[Callable[[], object]]:
    x, w = torch.randn(n, n), torch.randn(n, n)
    xb, wb, x8, w8 = x.bfloat16(), w.bfloat16(), fp8(x), fp8(w)
    return [lambda: x @ w, lambda: xb @ wb.t(), lambda: product(w8, x8), lambda: product(wb, xb)]


def _best(function: Callable[[], object], seconds: float) -> float:
    """The least time of a call, of as many as fit into ``seconds``, and of at least seven unless these take long. Other work on the machine can only
    make a call slower."""
    times: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < (seconds if len(times) >= 7 else _LONG_ENOUGH) or not times:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
