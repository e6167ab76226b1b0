"""A training step by both executors, beside torch's two ways: each in a process of its own, as threads that wait by spinning would slow the next.

``python -m benchmarks.executors MODEL CONTESTANT EXECUTOR`` prints the milliseconds of one of them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median
from typing import Any

from fusible.cli.bench.models import MODELS, describe_model, make_step
from fusible.machine import keep_freed_memory

__all__ = ["executors"]

CONTESTANTS = {
    "torch eager": ("torch", "eager"),
    "torch.compile": ("torch compiled", "eager"),
    **{f"{contestant} {executor}": (contestant, executor) for contestant in ("bf16", "delayed", "current", "mxfp8") for executor in ("eager", "xla")},
}
_ROUNDS, _WARM, _STEPS = 3, 4, 15


def executors() -> list[dict[str, Any]]:
    """Milliseconds of a training step: torch in bf16, eager and compiled, and Fusible in bf16, FP8 and MXFP8 by each of its executors. No target."""
    rows = []
    for model in MODELS:
        found: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        for _ in range(_ROUNDS):
            for name, chosen in CONTESTANTS.items():
                command = [sys.executable, "-m", "benchmarks.executors", model, *chosen]
                found[name].append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]))
        rows.append({"model": describe_model(model, False), **{name: median(times) for name, times in found.items()}})
    return rows


def _main(model: str, contestant: str, executor: str) -> None:
    keep_freed_memory()
    step, times = make_step(model, contestant, False, executor), []
    for i in range(_WARM + _STEPS):
        start = time.perf_counter()
        step()
        if i >= _WARM:
            times.append(time.perf_counter() - start)
    print(median(times) * 1e3)


if __name__ == "__main__":
    _main(*sys.argv[1:])
