"""``fusible quantize``: a checkpoint in high precision becomes a quantized one."""

from __future__ import annotations

import argparse

from fusible.errors import ArgumentError, check_number, expected
from fusible.models.checkpoints import quantize_checkpoint
from fusible.models.checkpoints.quantize import FORMATS

__all__ = ["quantize"]


def quantize(given: argparse.Namespace) -> int:
    """The job of ``fusible quantize``."""
    if given.format not in FORMATS:
        *names, last = FORMATS
        raise ArgumentError(expected(f"{', '.join(names)} or {last}", of="--format", got=repr(given.format), do="name one of these"))
    check_number(given.shard_size, "--shard-size", least=1e-6)
    made = quantize_checkpoint(given.directory, given.out, given.format, shard_size=int(given.shard_size * 1e9))
    smaller = f"{made.nbytes_before / 1e6:,.1f} MB became {made.nbytes / 1e6:,.1f} MB"
    print(f"{given.out}: {made.weights} weights in {given.format}; {smaller}.")
    return 0
