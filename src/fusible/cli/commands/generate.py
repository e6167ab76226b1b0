"""``fusible generate``."""

from __future__ import annotations

import argparse

from fusible.cli.command import Command
from fusible.cli.training.options import EXECUTORS

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Goes on from prompts with a model that 'fusible train' saved. All prompts are continued together, a byte of each per step, with keys and
values kept from step to step; the text of the first appears as it is made. Weights of an FP8 recipe are held in 8 bits alone."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the --out of a training command")
    parser.add_argument("--prompt", metavar="TEXT", action="append", help="a text to go on from; may be given several times (default: a new line)")
    parser.add_argument("--bytes", metavar="N", type=int, default=200, help="bytes to add to each prompt (default: 200)")
    parser.add_argument("--temperature", metavar="X", type=float, default=0.8, help="0: always the likeliest byte (default: 0.8)")
    parser.add_argument("--top-k", metavar="N", type=int, default=None, help="choose among the N likeliest bytes (default: all)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the choices (default: 0)")
    parser.add_argument("--recipe", metavar="R", default=None, help="the run to use, where DIR has several (default: an FP8 one)")
    parser.add_argument("--executor", metavar="E", default="eager", help=f"{' or '.join(EXECUTORS)}: kernel by kernel, or compiled (default: eager)")
    parser.add_argument("--page-size", metavar="N", type=int, default=None, help="keep keys and values in pages of N bytes (default: in one piece)")


COMMAND = Command(
    name="generate",
    summary="continue text with a trained model",
    description=_DESCRIPTION,
    arguments=_arguments,
    job="fusible.cli.generation.job:generate_text",
)
