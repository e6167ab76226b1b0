"""What a run leaves at its end: a model or adapters, figures and a picture."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from fusible import __version__, models
from fusible.cli.finetuning.data import tokenizer_folder
from fusible.cli.finetuning.run import Run
from fusible.cli.finetuning.setup import new_model
from fusible.cli.run_files import CHECKPOINT, MODEL_REPORTS
from fusible.cli.training.plot import smooth
from fusible.files import replace_files, replace_folder
from fusible.models import LanguageModel
from fusible.models.checkpoints.writing import other_files
from fusible.models.pretrained import language_model_from
from fusible.models.training import Trainer, load_run, merge_adapters, read_manifest, save_adapters

__all__ = ["print_summary", "write_results"]


def write_results(run: Run, out: Path) -> list[str]:
    """Write the model, or the adapters and what they make of it, then figures and a picture; the names of what was written. The state of the run is
    saved in ``out`` already."""
    options, model, written = run.options, _whole_model(run, out), list[str]()
    files = other_files(tokenizer_folder(options))
    if options.lora:
        save_adapters(model, _vacated(out, "adapter"), base=options.model)
        written.append(_placed(out, "adapter"))
    if options.merge:
        merged = language_model_from(options.model, trainable=True)
        merge_adapters(model, merged)
        models.save_pretrained(merged, _vacated(out, "model"), files=files)
        written.append(_placed(out, "model"))
    elif not options.lora:
        models.save_pretrained(model, _vacated(out, "model"), files=files)
        written.append(_placed(out, "model"))
    metrics = json.dumps(_metrics(run), indent=1, allow_nan=False).encode()
    replace_files(out, dict(zip(MODEL_REPORTS, (metrics, _drawn(run)), strict=True)))
    return [*written, *MODEL_REPORTS, CHECKPOINT]


def print_summary(console: Console, run: Run, out: Path, written: list[str]) -> None:
    """Two lines."""
    record, held_out = run.record, run.evaluations[-1][1] if run.evaluations else None
    told = f"held-out loss {held_out:.4f} (perplexity {np.exp(held_out):.2f})" if held_out is not None else f"loss {record.loss[-1]:.4f}"
    rate = record.steps_per_second * run.trainer.tokens_per_step
    console.print(f"{record.step} steps: {told}, {rate:,.0f} tokens/s, at most {record.peak_memory_bytes / 2**20:,.0f} MiB.")
    console.print(f"Written to {out}: {', '.join(written)}.")


def _whole_model(run: Run, out: Path) -> LanguageModel:
    """The model that was trained. Where each process has parts of it, it is put together of the state that was saved."""
    if not run.trainer.processes.divided:
        return run.trainer.model
    model = new_model(run.options)
    parameters, _ = Trainer.parted(load_run(out / CHECKPOINT, read_manifest(out / CHECKPOINT)))
    model.load_state_dict({**model.state_dict(), **parameters})
    return model


def _vacated(out: Path, name: str) -> Path:
    """Where the new folder ``name`` is written, before it takes the place of the former one."""
    new = out / f".{name}.new"
    shutil.rmtree(new, ignore_errors=True)
    return new


def _placed(out: Path, name: str) -> str:
    """Put the new folder in its place. Where a process is killed meanwhile, --resume writes it again: the state of the run is on the disk."""
    replace_folder(out / name, out / f".{name}.new")
    return name


def _metrics(run: Run) -> dict[str, Any]:
    record = run.record
    return {
        "options": run.options.to_json(),
        "data": run.data.described,
        "steps": record.step,
        "loss": record.loss,
        "held_out_loss": [{"step": step, "loss": loss} for step, loss in run.evaluations],
        "seconds": record.seconds,
        "tokens_per_second": record.steps_per_second * run.trainer.tokens_per_step,
        "peak_memory_bytes": record.peak_memory_bytes,
        "trained_parameters": sum(parameter.numel() for parameter in run.trainer.parameters.values()),
        "versions": {"fusible": __version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "processes": run.ranks.world,
    }


def _drawn(run: Run) -> bytes:
    """The losses of all steps and of what is held out, as PNG."""
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    loss, steps = run.record.loss, np.arange(1, run.step + 1)
    width = len(loss) // 30 * 2 + 1
    axes.plot(steps, loss, color="#1971c2", alpha=0.2, linewidth=0.8)
    axes.plot(steps, smooth(loss, width), color="#1971c2", linewidth=1.8, label=f"training (mean of {width} steps)")
    if run.evaluations:
        places, values = zip(*run.evaluations, strict=True)
        axes.plot(places, values, "o-", color="#d9480f", markersize=4, label=f"held out: {values[-1]:.4f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.25)
    axes.legend(framealpha=0.9, edgecolor="none")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
