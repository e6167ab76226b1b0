"""``fusible quantize``: a checkpoint in high precision becomes a quantized one."""

from __future__ import annotations

import argparse

from fusible.errors import ArgumentError, check_number, expected
from fusible.models.checkpoints import quantize_checkpoint
from fusible.models.checkpoints.quantize import FORMATS

__all__ = ["quantize"]


def quantize(arguments: argparse.Namespace) -> int:
    """The job of ``fusible quantize``."""
    if arguments.format not in FORMATS:
        *names, last = FORMATS
        raise ArgumentError(expected(f"{', '.join(names)} or {last}", of="--format", got=repr(arguments.format), do="name one of these"))
    check_number(arguments.shard_size, "--shard-size", least=1e-6)
    made = quantize_checkpoint(arguments.directory, arguments.out, arguments.format, shard_size=int(arguments.shard_size * 1e9))
    smaller = f"{made.nbytes_before / 1e6:,.1f} MB became {made.nbytes / 1e6:,.1f} MB"
    print(f"{arguments.out}: {made.weights} weights in {arguments.format}; {smaller}.")
    return 0
