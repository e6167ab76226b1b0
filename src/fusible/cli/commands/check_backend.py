"""``fusible check-backend``."""

from __future__ import annotations

import argparse

from fusible.cli.command import Command

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Calls every function that a backend has on samples in every dtype, and compares what comes of them with float64 and with the torch backend. A distance
is a share of what rounding allows. Exit code 1: something disagrees or fails; 2: there is no such backend here. With --matrix or --inventory nothing
is called: the one prints what the backend says it serves, as a Markdown table, the other how its functions differ from those of NVIDIA's module
transformer_engine_torch (exit code 1 where something differs for no known reason); of NAME 'tex' it compares the module that programs import."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a backend, as 'fusible info' lists them")
    parser.add_argument("--only", metavar="FUNCTION[,...]", default=None, help="the functions to check (default: all that the backend has)")
    parser.add_argument("--dtype", metavar="DTYPE[,...]", default=None, help="float32, bfloat16, float16 (default: all)")
    parser.add_argument("--device", metavar="DEVICE", default=None, help="where the tensors are (default: the device that the backend serves)")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--matrix", action="store_true", help="print what the backend serves, as a Markdown table")
    other.add_argument("--inventory", action="store_true", help="print how the backend differs from NVIDIA's module")
    parser.add_argument("--te-version", metavar="VERSION", default=None, help="the version of NVIDIA's module (default: the newest known)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


COMMAND = Command(
    name="check-backend",
    summary="run the conformance suite of tex functions on a backend",
    description=_DESCRIPTION,
    arguments=_arguments,
    job="fusible.cli.check_backend:check",
)
