"""``fusible info``."""

from __future__ import annotations

import argparse

from fusible.cli.command import Command

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tex", action="store_true", help="show instead, of every tex function, which backends serve it and why others do not")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


COMMAND = Command(
    name="info",
    summary="show backends, CPU features, threads, versions and environment variables",
    description="Shows what Fusible finds on this machine: backends (and why one is unavailable), native kernels, CPU features, threads, versions, "
    "and the environment variables that it reads.",
    arguments=_arguments,
    job="fusible.cli.info:info",
)
