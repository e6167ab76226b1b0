"""The files and the summary at the end of a training command."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fusible import __version__
from fusible.cli.console import make_table
from fusible.cli.training.options import TrainOptions
from fusible.cli.training.plot import draw_losses
from fusible.cli.training.text import Text
from fusible.cli.training.trainer import Trainer
from fusible.files import replace_files

__all__ = ["print_summary", "run_report", "write_reports"]


def run_report(trainer: Trainer, held_out_loss: float) -> dict[str, Any]:
    """The entry of one run in ``metrics.json``.

    ``loss``: of each step, and ``held_out_loss``, in nats per byte. ``tokens_per_second``: bytes over time, without the
    first step, which plans and compiles.
    ``peak_memory_bytes``: see ``PeakMemory``. ``backend``, ``calls``, ``matrix_products``, ``gemms``: see ``summarize_calls``.
    """
    record, options = trainer.record, trainer.options
    return {
        "recipe": trainer.recipe,
        "executor": options.executor,
        "steps": record.step,
        "loss": record.loss,
        "held_out_loss": held_out_loss,
        "seconds": record.seconds,
        "tokens_per_second": record.steps_per_second * options.batch * options.seq_len,
        "peak_memory_bytes": record.peak_memory_bytes,
        "parameters": trainer.parameters,
        **record.observation,
    }


def write_reports(out: Path, options: TrainOptions, text: Text, runs: Sequence[Mapping[str, Any]], plans: Mapping[str, str]) -> None:
    """Write ``metrics.json``, ``loss.png`` and ``pipeline.txt``, all or none."""
    unigram = text.unigram_loss()
    versions = {"fusible": __version__, "torch": torch.__version__, "python": platform.python_version()}
    metrics = {
        "runs": runs,
        "unigram_loss": unigram,
        "text": text.describe(),
        "options": options.to_json(),
        "versions": versions,
        "threads": torch.get_num_threads(),
    }
    pipeline = "\n\n".join(f"== {recipe} ==\n\n{plan}" for recipe, plan in plans.items())
    contents = {
        "metrics.json": json.dumps(metrics, indent=1, allow_nan=False).encode(),
        "loss.png": draw_losses(runs, unigram),
        "pipeline.txt": f"{pipeline}\n".encode(),
    }
    replace_files(out, contents)


def print_summary(console: Console, out: Path, text: Text, runs: Sequence[Mapping[str, Any]]) -> None:
    """A table with a row per run, and where the files are."""
    unigram = text.unigram_loss()
    table = make_table("recipe", ">steps", ">held-out loss", ">below unigram", ">tokens/s", ">peak memory", "GEMMs on FP8 or FP4 operands", "backend")
    for run in runs:
        counts, number = [of for precision, of in run["gemms"].items() if precision != "other"], run["matrix_products"]
        table.add_row(
            run["recipe"],
            str(run["steps"]),
            f"{run['held_out_loss']:.4f}",
            f"{100 * (1 - run['held_out_loss'] / unigram):.1f} %",
            f"{run['tokens_per_second']:,.0f}",
            f"{run['peak_memory_bytes'] / 2**20:,.0f} MiB",
            ", ".join(f"{direction} {sum(count[direction] for count in counts)}/{number}" for direction in counts[0]),
            run["backend"],
        )
    console.print(table)
    console.print(
        f"A unigram byte model loses {unigram:.4f} nats per byte. Written to {out}: metrics.json, loss.png, pipeline.txt and the checkpoints."
    )
