"""``fusible quantize``."""

from __future__ import annotations

import argparse

from fusible.cli.command import Command

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Quantizes the linear layers within the blocks of a Hugging Face checkpoint and writes another, which transformers and vLLM read. Embeddings, the head,
norms and routers stay as they are, and so do weights that are no whole blocks of the format. Tokenizer and other files are copied."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the model: config.json and model.safetensors, or several files and their index")
    parser.add_argument(
        "--format", metavar="F", required=True,
        help="fp8 (one scale a weight), block (128x128, as DeepSeek), mxfp8, nvfp4 or mxfp4",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", required=True, help="where to write: a new folder")
    parser.add_argument("--shard-size", metavar="X", type=float, default=5.0, help="gigabytes in a file at most (default: 5)")


COMMAND = Command(
    name="quantize",
    summary="quantize a checkpoint to FP8, MXFP8, NVFP4 or MXFP4",
    description=_DESCRIPTION,
    arguments=_arguments,
    job="fusible.cli.quantize:quantize",
)
