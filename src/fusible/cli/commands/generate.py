"""``fusible generate``."""

from __future__ import annotations

import argparse

from fusible.cli.command import Command
from fusible.cli.training.options import EXECUTORS

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Goes on from prompts with a model: of a Hugging Face directory, or one that 'fusible train' saved. All prompts are continued together, a token of
each per step, with keys and values kept from step to step; the text of the first appears as it is made. A model that encodes texts, as T5 does,
encodes each prompt, and the text that it writes of it is printed alone. Weights of a recipe of 8 or 4 bits are held in these alone."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a Hugging Face directory, or the --out of a training command")
    parser.add_argument("--prompt", metavar="TEXT", action="append", help="a text to go on from; may be given several times (default: a new line)")
    parser.add_argument("--temperature", metavar="X", type=float, help="0: always the likeliest (default: the directory's own, or 0.8)")
    parser.add_argument("--top-k", metavar="N", type=int, help="choose among the N likeliest (default: the directory's own, or all)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the choices; each prompt of a directory has one more (default: 0)")
    parser.add_argument("--page-size", metavar="N", type=int, help="keep keys and values in pages of N (default: 16; of a run, in one piece)")
    executors = f"{' or '.join(EXECUTORS)}: kernel by kernel, or programs that are compiled as the text begins (default: eager)"
    parser.add_argument("--executor", metavar="E", help=executors)
    directories = parser.add_argument_group("of a Hugging Face directory")
    directories.add_argument("--chat", action="store_true", help="each prompt is what a user says, in the model's chat template")
    directories.add_argument("--system", metavar="TEXT", help="the system message of --chat")
    directories.add_argument("--max-tokens", metavar="N", type=int, help="tokens to add to each prompt at most (default: 200)")
    directories.add_argument("--top-p", metavar="X", type=float, help="choose among the fewest likeliest whose probabilities add up to X")
    directories.add_argument("--min-p", metavar="X", type=float, help="choose among those that are at least X times as likely as the likeliest")
    directories.add_argument("--repetition-penalty", metavar="X", type=float, help="makes tokens that the text has less likely, above 1")
    directories.add_argument("--stop", metavar="TEXT", action="append", help="ends a text where it comes; may be given several times")
    directories.add_argument("--format", metavar="F", help="what weights are held in: bf16, fp8, block, mxfp8, nvfp4 or mxfp4 (default: as they are)")
    directories.add_argument("--device", metavar="D", help="where the model is, e.g. cuda (default: cpu)")
    directories.add_argument("--max-memory", metavar="SIZE", help="what the process may take in all, e.g. 24GiB (default: what there is)")
    runs = parser.add_argument_group("of a run")
    runs.add_argument("--bytes", metavar="N", type=int, help="bytes to add to each prompt (default: 200)")
    runs.add_argument("--recipe", metavar="R", help="the run to use, where DIR has several (default: an FP8 one)")


COMMAND = Command(
    name="generate",
    summary="continue text with a trained model",
    description=_DESCRIPTION,
    arguments=_arguments,
    job="fusible.cli.generation.job:generate_text",
)
