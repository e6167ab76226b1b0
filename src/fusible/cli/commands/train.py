"""``fusible train``."""

from __future__ import annotations

import argparse
from typing import Any

from fusible.cli.command import Command
from fusible.cli.finetuning.choice import job_of
from fusible.cli.finetuning.options import BASE_FORMATS, MOMENTS, FinetuneOptions
from fusible.cli.training.options import BF16_LAYERS, EXECUTORS, FP8_FORMATS, RECIPES, TrainOptions

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Trains a byte-level GPT, written with fusible.Sequential, on text, and compares precisions: each recipe starts from the same weights and sees the
same batches. The last tenth of the text is held out.

With --model, trains that language model instead, whole or by adapters (LoRA), on your files: .txt, .jsonl or .parquet, packed into windows in which
no document sees another."""

_FILES = """\
files in DIR, with --model:
  model/             the trained model, as transformers loads it (with --lora: where --merge is given)
  adapter/           with --lora: the adapters, as PEFT loads them
  metrics.json       the loss of each step, losses on what is held out, figures, options
  loss.png           the losses
  checkpoint/        all that is needed to resume bit-exactly

files in DIR, without:
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
    many = parser.add_argument_group(
        "processes, as torchrun --nproc-per-node N -m fusible train starts them",
        "with --model: --tensor-parallel, --sequence-parallel, --expert-parallel, --data-parallel and --shard-parameters",
    )
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
    _of_models(parser)
    parser.add_argument("--out", metavar="DIR", default=None, help="where to write (default: out/train, or out/model, or the resumed folder)")
    parser.add_argument("--resume", metavar="DIR", default=None, help="go on with the run in DIR; it keeps its options, --steps may be raised")
    parser.add_argument("--overwrite", action="store_true", help="start anew though DIR holds a run, which stays valid until the first save")
    parser.add_argument("--save-every", metavar="N", type=int, default=0, help="also save after every N steps (default: at the end and on Ctrl-C)")


def _of_models(parser: argparse.ArgumentParser) -> None:
    """The options of ``FinetuneOptions``, absent where the command line does not give them."""
    text = "--steps, --seq-len, --batch, --lr, --decay-steps, --seed and --recipe (one) count here too, in tokens instead of bytes"
    other = "defaults: --seq-len 512, --batch 8, --lr 1e-4, --decay-steps as --steps"
    group = parser.add_argument_group("a model of yours", f"{text}; {other}")
    default = FinetuneOptions("", ("none",))

    def option(name: str, metavar: str, kind: type, text: str, shown: object = None, **more: Any) -> None:
        value = getattr(default, name, None) if shown is None else shown
        note = f" (default: {value})" if value not in (None, "") else ""
        group.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, type=kind, help=text + note, default=argparse.SUPPRESS, **more)

    option("model", "DIR", str, "a directory with weights, or a config.json, whose model begins at random")
    option("data", "FILE", str, "files, or patterns such as 'texts/*.txt'; of records text, messages, or prompt and completion", "", nargs="+")
    option("eval_data", "FILE", str, "what to evaluate on", "a share of --data", nargs="+")
    option("eval_share", "X", float, "the share of the tokens that is held out")
    option("eval_every", "N", int, "also evaluate after every N steps", "at the end")
    option("tokenizer", "DIR", str, "the directory of the tokenizer", "the model's")
    option("micro_batch", "N", int, "windows that go through the model at once; their gradients are summed up to --batch", "all of --batch")
    option("warmup", "N", int, "steps in which the learning rate rises")
    option("min_lr", "X", float, "the share of the learning rate that is left at --decay-steps")
    option("weight_decay", "X", float, "of matrices")
    option("clip", "X", float, "the largest norm of all gradients together, 0 for any")
    option("moments", "F", str, f"what the optimizer holds moments in: {', '.join(MOMENTS)} (of fp8 the second ones in fp16)")
    option("lora", "N", int, "the rank of adapters; 0 trains all parameters")
    option("lora_alpha", "X", float, "their factor, times the rank", "twice the rank")
    option("lora_targets", "T[,T...]", str, "the layers that get one, by the last parts of their names", "all products of blocks")
    option("base_format", "F", str, f"what the weights beneath adapters are held in: {', '.join(BASE_FORMATS)}")
    option("device", "D", str, "where it is computed, e.g. cuda")
    merged = "also write the model with its adapters added to its weights"
    group.add_argument("--merge", action="store_true", default=argparse.SUPPRESS, help=merged)


COMMAND = Command(
    name="train",
    summary="train a model of yours, or a byte-level GPT to compare precisions",
    description=_DESCRIPTION,
    arguments=_arguments,
    job=job_of,
)
