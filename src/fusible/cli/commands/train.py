"""``fusible train``."""

from __future__ import annotations

import argparse

from fusible.cli.command import Command
from fusible.cli.training.options import BF16_LAYERS, EXECUTORS, FP8_FORMATS, RECIPES, TrainOptions

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Trains a byte-level GPT, written with fusible.Sequential, on text, and compares precisions: each recipe starts from the same weights and sees the
same batches. The last tenth of the text is held out."""

_FILES = """\
files in DIR:
  metrics.json       runs (loss of each step, held-out loss, tokens per second, memory, kernels called), unigram loss, text, options
  loss.png           the losses of all recipes
  pipeline.txt       the fused passes and the type on every edge, for each recipe
  model.safetensors  the weights, and state.safetensors and state.json with them all that is needed to resume bit-exactly;
                     several processes each write shard-<n>-... in the place of model.safetensors, of weights and optimizer;
                     with several recipes all of these are in one folder per recipe, DIR/<recipe>/

Ctrl-C saves and stops; --resume DIR goes on from there. The learning rate follows --decay-steps and not --steps, so a run that
is resumed up to step N is bit for bit the run that went to N at once; for long runs give both."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _FILES
    default = TrainOptions()

    def option(name: str, metavar: str, kind: type, text: str, shown: object = None) -> None:
        """An option of ``TrainOptions``, absent where the command line does not give it. ``shown``: what help says of its default."""
        value = getattr(default, name, None) if shown is None else shown
        note = f" (default: {value})" if value is not None else ""
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, type=kind, help=text + note, default=argparse.SUPPRESS)

    option("recipe", "R[,R...]", str, f"{', '.join(RECIPES)}, or several", ",".join(default.recipes))
    option("executor", "E", str, f"{' or '.join(EXECUTORS)}: kernel by kernel, or compiled")
    option("bf16_layers", "L[,L...]", str, f"{', '.join(BF16_LAYERS)}: what no recipe quantizes of the first and the last block and the head", "none")
    option("fp8_format", "F", str, f"{' or '.join(FP8_FORMATS)}: gradients in E5M2 or in E4M3", "e4m3 in mxfp8 and block, else hybrid")
    option("steps", "N", int, "optimizer steps in all, those before --resume included")
    option("layers", "N", int, "transformer blocks")
    option("hidden", "N", int, "width")
    option("heads", "N", int, "attention heads")
    option("experts", "N", int, "experts in each block, in the place of the layers that all bytes take", "none")
    option("top_k", "N", int, "experts that a byte takes")
    option("seq_len", "N", int, "bytes in a window")
    option("batch", "N", int, "windows in a step")
    option("lr", "X", float, "peak learning rate")
    option("decay_steps", "N", int, "step at which the learning rate has fallen to a twentieth of its peak, where it stays")
    option("seed", "N", int, "seed of weights and batches")
    option("text", "FILE", str, "the text to learn", "the interpreter's documentation topics")
    many = parser.add_argument_group("processes, as torchrun --nproc-per-node N -m fusible train starts them")
    many.add_argument("--tensor-parallel", metavar="N", type=int, default=1, help="processes that share out columns and heads (default: 1)")
    many.add_argument("--sequence-parallel", action="store_true", help="these share out the rows of norms and residuals too")
    many.add_argument("--context-parallel", metavar="N", type=int, default=1, help="processes that share out the bytes of a window (default: 1)")
    many.add_argument(
        "--context-way", choices=("all_to_all", "ring"), default="all_to_all", help="these exchange heads, or pass keys and values round"
    )
    many.add_argument("--expert-parallel", metavar="N", type=int, default=1, help="processes that share out experts and windows (default: 1)")
    many.add_argument("--pipeline-parallel", metavar="N", type=int, default=1, help="stages that share out the layers (default: 1)")
    many.add_argument(
        "--microbatches", metavar="N", type=int, default=argparse.SUPPRESS, help="parts in which a batch goes through the stages (default: as many)"
    )
    many.add_argument("--data-parallel", metavar="N", type=int, default=argparse.SUPPRESS, help="parts of each batch (default: what is left)")
    many.add_argument("--shard-parameters", action="store_true", help="these share out parameters, gradients and moments (FSDP)")
    parser.add_argument("--out", metavar="DIR", default=None, help="where to write (default: out/train, or the resumed folder)")
    parser.add_argument("--resume", metavar="DIR", default=None, help="go on with the run in DIR; it keeps its options, --steps may be raised")
    parser.add_argument("--overwrite", action="store_true", help="start anew though DIR holds a run, which stays valid until the first save")
    parser.add_argument("--save-every", metavar="N", type=int, default=0, help="also save after every N steps (default: at the end and on Ctrl-C)")


COMMAND = Command(
    name="train",
    summary="train a byte-level GPT and compare precisions",
    description=_DESCRIPTION,
    arguments=_arguments,
    job="fusible.cli.training.job:train",
)
