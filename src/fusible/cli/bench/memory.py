"""The memory that training takes, measured in a process of its own: ``python -m fusible.cli.bench.memory MODEL CONTESTANT THREADS [quick]``."""

from __future__ import annotations

import subprocess
import sys

import torch

from fusible.cli.bench.models import make_step
from fusible.cli.training.memory import PeakMemory
from fusible.errors import FusibleError
from fusible.machine import return_large_blocks

__all__ = ["peak_memory"]

_STEPS, _SECONDS = 4, 600


def peak_memory(model: str, contestant: str, threads: int, quick: bool) -> int | str:
    """The peak resident set of four steps less that before the first, in bytes; or, where the process failed, why.

    Weights and inputs are there before; gradients, what backward needs, 8-bit copies and the optimizer's state are not.
    """
    command = [sys.executable, "-m", "fusible.cli.bench.memory", model, contestant, str(threads), *(["quick"] if quick else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it took more than {_SECONDS} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return int(done.stdout.split()[-1])


def _main(model: str, contestant: str, threads: str, *quick: str) -> None:
    return_large_blocks()  # what is compared is less than the holes in a heap
    torch.set_num_threads(int(threads))
    small = make_step(model, contestant, quick=True)  # loads libraries and, where there is one, the compiler
    for _ in range(_STEPS):
        small()
    step = make_step(model, contestant, quick=bool(quick))
    with PeakMemory(interval=1e-3) as before:
        pass
    with PeakMemory(interval=1e-3) as memory:
        for _ in range(_STEPS):
            step()
    print(max(0, memory.peak - before.peak))


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except (FusibleError, RuntimeError) as error:
        sys.exit(str(error))
