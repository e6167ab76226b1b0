"""``fusible evaluate``."""

from __future__ import annotations

import argparse

from fusible.cli.command import Command

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Holds the weights of a model in each of several number formats, and tells what each costs on a text: perplexity, the divergence of a token's
distribution from that of the model as it is, how often the likeliest token is the same, bytes, and tokens a second. The table is printed, and with
--out written as quality.json, quality.md and quality.png. Of a model whose weights are quantized already it tells what they are worth as they are
stored: they take no other format."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a directory that transformers wrote: config.json, weights in safetensors, tokenizer.json")
    parser.add_argument("--text", metavar="FILE", required=True, help="a text in UTF-8")
    formats = "bf16,fp8,block,mxfp8,nvfp4,mxfp4"
    parser.add_argument("--formats", metavar="F", help=f"comma-separated (default: {formats}; of a quantized model its own)")
    parser.add_argument("--window", metavar="N", type=int, default=512, help="tokens that are read at once (default: 512)")
    parser.add_argument("--tokens", metavar="N", type=int, default=8192, help="tokens of the text to read, from its begin (default: 8192)")
    parser.add_argument("--device", metavar="D", default="cpu", help="where the model is, e.g. cuda (default: cpu)")
    parser.add_argument("--out", metavar="OUT", default=None, help="a directory to write the table to, and a plot")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in OUT")


COMMAND = Command(
    name="evaluate",
    summary="show what each number format costs a model in quality",
    description=_DESCRIPTION,
    arguments=_arguments,
    job="fusible.cli.evaluation.job:evaluate_formats",
)
