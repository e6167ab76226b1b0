"""The memory that a run needs, estimated before it begins, and its peak while it runs."""

from __future__ import annotations

import threading
from typing import Self

from fusible.cli.training.options import BYTES, TrainOptions
from fusible.errors import ArgumentError, expected
from fusible.machine import available_memory, resident_memory

__all__ = ["PeakMemory", "check_memory", "needed_memory", "parameter_count"]

_OPERAND = {"fp32": 4.0, "bf16": 2.0, "nvfp4": 0.5}
"""Bytes per value of an operand that a matrix product saves for the backward pass, by recipe; 1 in the others."""


def parameter_count(options: TrainOptions) -> int:
    """The parameters of ``ByteGPT(options, ...)``: an embedding, two norms and four matrices with biases a layer, a norm and a head. Experts have two
    matrices each, without biases, and their router one."""
    h = options.hidden
    products = options.experts * (8 * h * h + h) if options.experts else (4 * h * h + 4 * h) + (4 * h * h + h)
    layer = 4 * h + (3 * h * h + 3 * h) + (h * h + h) + products
    return BYTES * h + options.layers * layer + 2 * h + BYTES * h + BYTES


def needed_memory(options: TrainOptions, recipe: str) -> int:
    """Bytes that a run needs at least.

    A parameter takes four fp32 values: itself, its gradient and two moments. For the backward pass every layer saves, per token, the operands of its
    four products (7 hidden values in all, 5 of them of the last two) and, in the dtype of activations, the inputs of its norms, of GELU (4) and of
    attention (9 in all); what experts take, once for each expert of a token. The logits and their gradient are fp32, the bytes of the windows int64.
    """
    tokens, each = options.batch * options.seq_len, options.top_k if options.experts else 1
    kept = (2 + 5 * each) * _OPERAND.get(recipe, 1.0) + (5 + 4 * each) * (4 if recipe == "fp32" else 2)
    activations = int(tokens * options.layers * options.hidden * kept) + tokens * (2 * 4 * BYTES + 2 * 8)
    return 16 * parameter_count(options) + activations


def check_memory(options: TrainOptions, recipe: str) -> None:
    """Raises ``ArgumentError`` if a run needs more memory than there is, before anything is allocated."""
    needed, there = needed_memory(options, recipe), available_memory()
    if needed > there:
        sizes = f"--layers {options.layers} --hidden {options.hidden} --batch {options.batch} --seq-len {options.seq_len}"
        got = f"{sizes} under {recipe}, which needs at least {_shown(needed)}"
        do = "give smaller sizes"
        raise ArgumentError(expected(f"a run that fits in the {_shown(there)} of memory that are left", of="this machine", got=got, do=do))


def _shown(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


class PeakMemory:
    """``with PeakMemory() as memory: ...``: ``memory.peak`` is the largest resident set of the whole process seen meanwhile, in bytes.

    A thread looks every ``interval`` seconds, so a shorter peak can be missed. All of the process counts: the interpreter, libraries (some
    hundred MB for torch), and what earlier work left with the allocator. Where there is no ``/proc`` the peak is that since the process began.
    """

    def __init__(self, interval: float = 0.02) -> None:
        self.peak = 0
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.peak = resident_memory()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, resident_memory())

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self.peak = max(self.peak, resident_memory())
