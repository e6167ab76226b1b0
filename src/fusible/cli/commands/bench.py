"""``fusible bench``."""

from __future__ import annotations

import argparse

from fusible.cli.bench.options import TABLES, BenchOptions
from fusible.cli.command import Command
from fusible.knobs import CPU_LEVELS

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Measures Fusible beside plain torch on this machine. The two take turns in one process; every figure is a median, and a ratio says how many times as
fast Fusible is (of bytes: which part of torch's it needs). Beside it stands what it aims at, and what bounds it: matrix products or bandwidth,
each as a share of the best measured here at the start, or overhead."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["tables:", *(f"  {name:<12}{summary}" for name, summary in TABLES.items())])
    parser.add_argument("--only", metavar="NAME[,NAME]", default=None, help="the tables to measure (default: all)")
    rounds = BenchOptions.rounds
    parser.add_argument("--rounds", metavar="N", type=int, default=rounds, help=f"turns of each contestant (default: {rounds})")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that all runs, and says nothing of speed")
    parser.add_argument("--threads", metavar="N", type=int, default=None, help="of torch and the native kernels (default: 2, or the cores there are)")
    level = "measure as on a CPU of that level, torch held to the same: " + ", ".join(CPU_LEVELS)
    parser.add_argument("--level", metavar="LEVEL", default=None, help=level)
    json = "also write the figures to FILE; '-': to standard output, and the tables to standard error"
    parser.add_argument("--json", metavar="FILE", default=None, help=json)


COMMAND = Command(
    name="bench",
    summary="measure Fusible beside plain torch on this machine",
    description=_DESCRIPTION,
    arguments=_arguments,
    job="fusible.cli.bench.job:bench",
)
