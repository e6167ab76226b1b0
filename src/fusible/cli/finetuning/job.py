"""The job of ``fusible train --model``: every option, file and checkpoint is checked before anything is written."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

from fusible.cli.console import make_console
from fusible.cli.finetuning.data import read_data, tokenizer_folder
from fusible.cli.finetuning.options import FinetuneOptions
from fusible.cli.finetuning.results import check_free, discard_results, print_summary, write_results
from fusible.cli.finetuning.run import Run, saved_options
from fusible.cli.finetuning.setup import base_files, check_model, load_model
from fusible.cli.folders import make_out_folder
from fusible.cli.training.interruption import Interruption
from fusible.cli.training.memory import PeakMemory
from fusible.cli.training.progress import ProgressView, make_progress
from fusible.errors import ArgumentError, expected
from fusible.models.text import Tokenizer
from fusible.models.training import Cosine, StepOptions, Trainer

__all__ = ["finetune"]

_OUT = "out/model"
_DONE, _INTERRUPTED = 0, 130


def finetune(given: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    options, resumed = _begin(given)
    out = Path(given.out or given.resume or _OUT)
    goes_on = resumed is not None and out.resolve() == resumed.resolve()
    if not goes_on and not given.overwrite:
        check_free(out)
    run = _prepared(options, resumed)
    make_out_folder(out)
    console = make_console()
    _announce(console, run)
    if not _trained(run, out, given.save_every, make_progress(console), fresh=not goes_on):
        print(f"Interrupted and saved after step {run.step} of {options.steps}: go on with 'fusible train --resume {out}'.", file=sys.stderr)
        return _INTERRUPTED
    written = write_results(run, out)
    print_summary(console, run, out, written)
    return _DONE


def _begin(given: argparse.Namespace) -> tuple[FinetuneOptions, Path | None]:
    """The options in force, and the folder of the run that is resumed."""
    if given.save_every < 0:
        raise ArgumentError(expected("at least 0", of="--save-every", got=given.save_every, do="give a number of steps, or 0 for none"))
    if given.resume is None:
        return FinetuneOptions.from_command_line(vars(given)), None
    if given.overwrite:
        raise ArgumentError(expected("--resume or --overwrite", of="a command", got="both", do="go on with the run, or start anew without --resume"))
    folder = Path(given.resume)
    saved, done = saved_options(folder)
    options = saved.continued(vars(given))
    if options.steps < done:
        raise ArgumentError(expected(f"at least the {done} steps that are done", of="--steps", got=options.steps, do="give a larger number"))
    return options, folder


def _prepared(options: FinetuneOptions, resumed: Path | None) -> Run:
    """The run as it begins, or goes on."""
    check_model(options)
    tokenizer = Tokenizer.from_folder(tokenizer_folder(options))
    model = load_model(options, tokenizer)
    data = read_data(options, tokenizer)
    rate = Cosine(options.lr, options.warmup, options.decay_steps or options.steps, options.min_lr)
    steps = StepOptions(options.batch, options.at_once, rate, options.weight_decay, options.clip, seed=options.seed)
    run = Run(options, Trainer(model, data.training, steps), data, base_files(options))
    if resumed is not None:
        run.load(resumed)
    return run


def _trained(run: Run, out: Path, save_every: int, progress: ProgressView, fresh: bool) -> bool:
    """Train up to ``options.steps`` and save; false where Ctrl-C cut it short. ``fresh``: the first save replaces what another left in ``out``."""
    options, record, replaces, place = run.options, run.record, fresh, run.trainer.model.device

    def save() -> None:
        nonlocal replaces
        run.save(out)
        if replaces:
            discard_results(out)
            replaces = False

    progress.begin(options.recipe, run.step, options.steps, run.trainer.tokens_per_step)
    try:
        with PeakMemory() as memory, Interruption() as interruption:
            while run.step < options.steps and not interruption.asked:
                progress.step(run.advance())
                taken = torch.cuda.max_memory_allocated(place) if place.type == "cuda" else memory.peak
                record.peak_memory_bytes = max(record.peak_memory_bytes, taken)
                if options.eval_every and run.step % options.eval_every == 0:
                    run.evaluate()
                if save_every and run.step % save_every == 0 and run.step < options.steps:
                    save()
    finally:
        progress.end()
    done = run.step == options.steps
    try:
        if done:
            run.evaluate()
    finally:
        save()
    return done


def _announce(console: Console, run: Run) -> None:
    """Two lines on what is trained, on what, with what."""
    options, told = run.options, run.data.described
    count = sum(parameter.numel() for parameter in run.trainer.parameters.values())
    what = f"adapters of rank {options.lora}, {count:,} parameters," if options.lora else f"{count:,} parameters"
    console.print(f"{Path(options.model).name}: {what} on {told['training']['documents']:,} documents of {told['training']['tokens']:,} tokens.")
    work = f"{options.steps} steps of {options.batch} x {options.seq_len} tokens, {options.at_once} windows at once"
    place = run.trainer.model.device
    on = f"{torch.get_num_threads()} threads" if place.type == "cpu" else f"on {place}"
    console.print(f"{work}, {options.recipe}, {on}.")
