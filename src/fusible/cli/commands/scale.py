"""``fusible scale``."""

from __future__ import annotations

import argparse

from fusible.cli.command import Command
from fusible.cli.training.options import RECIPES

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Searches the layouts of a model on many GPUs, and shows the best: what each GPU sends in a step and holds in memory, the time that it waits for
others, and the tokens that it trains on. All is derived from the ops that a block becomes and from published speeds; nothing is run."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", default="llama-70b", help="llama-7b, llama-70b or llama-400b-moe (default: llama-70b)")
    parser.add_argument("--gpus", metavar="N", type=int, required=True, help="how many GPUs there are")
    parser.add_argument("--recipe", metavar="R", default="bf16", help=f"{', '.join(RECIPES)} (default: bf16)")
    parser.add_argument("--seq-len", metavar="N", type=int, default=4096, help="tokens of a sequence (default: 4096)")
    parser.add_argument("--batch", metavar="N", type=int, default=1024, help="sequences in a step (default: 1024)")
    parser.add_argument("--rows", metavar="N", type=int, default=5, help="layouts to show (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


COMMAND = Command(
    name="scale",
    summary="find the best layout of a model on many GPUs",
    description=_DESCRIPTION,
    arguments=_arguments,
    job="fusible.cli.scale:scale",
)
