"""``fusible check-backend``."""

from __future__ import annotations

import argparse

from fusible.cli.command import Command

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Calls every function that a backend has on samples in every dtype, and compares what comes of them with float64 and with the torch backend. A distance
is a share of what rounding allows. Exit code 1: something disagrees or fails; 2: there is no such backend here."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a backend, as 'fusible info' lists them")
    parser.add_argument("--only", metavar="FUNCTION[,...]", default=None, help="the functions to check (default: all that the backend has)")
    parser.add_argument("--dtype", metavar="DTYPE[,...]", default=None, help="float32, bfloat16, float16 (default: all)")
    parser.add_argument("--device", metavar="DEVICE", default=None, help="where the tensors are (default: the device that the backend serves)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


COMMAND = Command(
    name="check-backend",
    summary="run the conformance suite of tex functions on a backend",
    description=_DESCRIPTION,
    arguments=_arguments,
    job="fusible.cli.check_backend:check",
)
