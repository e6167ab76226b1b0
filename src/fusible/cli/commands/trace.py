"""``fusible trace``."""

from __future__ import annotations

import argparse

from fusible.cli.command import Command

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Runs a script that uses fusible.lazy, and shows every program that it evaluates or compiles: as trace, as FlatIR and as StableHLO, side by side where
the terminal is wide enough, with the lines of the script that recorded it. A program that was shown before is named only. Exit code 1: the
script raised."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--optimized", action="store_true", help="show FlatIR and StableHLO as they are after the passes, and what those did")
    parser.add_argument("script", metavar="SCRIPT", help="the script's file")
    parser.add_argument("args", metavar="...", nargs=argparse.REMAINDER, help="its arguments")


COMMAND = Command(
    name="trace",
    summary="show what a script of fusible.lazy records, and what is made of it",
    description=_DESCRIPTION,
    arguments=_arguments,
    job="fusible.cli.tracing.job:trace_script",
)
