"""``fusible run``."""

from __future__ import annotations

import argparse

from fusible.cli.command import Command

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Runs a script that was written for Transformer Engine as it is: transformer_engine_torch and the other names of its kernels lead to Fusible, and
NVIDIA's Python package, where it is installed, runs on them. Where it is not, its fusible operations, recipes and quantized tensors are Fusible's
own. With --device cpu, what the script asks of a GPU is done by the CPU. The Python processes that the script starts are served alike."""


def _capability(text: str) -> tuple[int, int]:
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected MAJOR.MINOR, as 9.0, got {text!r}")
    return int(major), int(minor)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu"], default=None, help="serve requests for CUDA by this device (default: leave them)")
    parser.add_argument(
        "--capability", type=_capability, default=(9, 0), metavar="MAJOR.MINOR",
        help="with --device, the compute capability that the script is told of: from 10.0 on MXFP8 is NVIDIA's default recipe (default: 9.0)",
    )  # fmt: skip
    parser.add_argument("--replace", action="store_true", help="take the place of NVIDIA's own kernels where they are installed")
    parser.add_argument("--tripy", action="store_true", help="let the names tripy and nvtripy lead to fusible.lazy")
    parser.add_argument("--replace-package", action="store_true", help="take the place of NVIDIA's Python package where it is installed")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, and its arguments, as a script")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the script's file")
    parser.add_argument("args", metavar="...", nargs=argparse.REMAINDER, help="its arguments")


COMMAND = Command(
    name="run",
    summary="run a script that was written for Transformer Engine",
    description=_DESCRIPTION,
    arguments=_arguments,
    job="fusible.compat.script:run_script",
)
