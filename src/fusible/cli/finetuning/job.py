"""The job of ``fusible train --model``: every option, file and checkpoint is checked before anything is written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console

from fusible.cli.console import make_console
from fusible.cli.finetuning.data import read_data, tokenizer_folder
from fusible.cli.finetuning.options import FinetuneOptions
from fusible.cli.finetuning.results import print_summary, write_results
from fusible.cli.finetuning.run import Run, saved_options
from fusible.cli.finetuning.setup import base_files, check_model, load_model
from fusible.cli.finetuning.shares import check_shares, facts_of
from fusible.cli.folders import held_out_folder
from fusible.cli.run_files import check_apart, check_free, check_same_runs, discard_demo, discard_model, discard_void, seals
from fusible.cli.training.interruption import Interruption
from fusible.cli.training.memory import PeakMemory
from fusible.cli.training.progress import ProgressView, make_progress
from fusible.cli.training.ranks import Layout, Ranks, together
from fusible.errors import ArgumentError, FusibleError, expected
from fusible.models.families import left_to_chance
from fusible.models.text import Tokenizer
from fusible.models.training import Cosine, Processes, StepOptions, Trainer

__all__ = ["finetune"]

_OUT = "out/model"
_DONE, _REFUSED, _INTERRUPTED = 0, 2, 130
_SILENCE = timedelta(minutes=30)
"""How long a process that has not gone may be silent: the first one writes the model of all, or a step takes long."""


def finetune(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    with ExitStack() as until_the_end:
        return together(lambda ranks: _finetune(arguments, ranks, until_the_end))


def _finetune(arguments: argparse.Namespace, ranks: Ranks, until_the_end: ExitStack) -> int:
    try:
        options, resumed, layout = _begin(arguments, ranks.world)
        out = Path(arguments.out or arguments.resume or _OUT)
        goes_on = resumed is not None and out.resolve() == resumed.resolve()
        if not goes_on and not arguments.overwrite:
            check_free(out)
        if not goes_on:
            check_apart(out, _read(options))
        found = seals(out)
        check_model(options)
    except FusibleError:
        if ranks.first:
            raise
        return _REFUSED  # each process finds the same in what it was told, and the first says it
    run = _prepared(options, resumed, layout, ranks)
    with ranks.telling():
        if ranks.first:
            until_the_end.enter_context(held_out_folder(out))
            check_same_runs(out, found, arguments.overwrite)
    console = make_console(None if ranks.first else StringIO())
    _announce(console, run)
    if not _trained(run, out, arguments.save_every, make_progress(console), fresh=not goes_on):
        if ranks.first:
            print(f"Interrupted and saved after step {run.step} of {options.steps}: go on with 'fusible train --resume {out}'.", file=sys.stderr)
        return _INTERRUPTED
    with ranks.telling():
        if ranks.first:
            written = write_results(run, out)
            print_summary(console, run, out, written)
    return _DONE


def _read(options: FinetuneOptions) -> Iterator[tuple[str, Path]]:
    """What a run reads, each behind its option."""
    yield "--model", Path(options.model)
    yield "--tokenizer", tokenizer_folder(options)
    yield from (("--data", Path(file)) for file in options.data)
    yield from (("--eval-data", Path(file)) for file in options.eval_data)


def _begin(arguments: argparse.Namespace, world: int) -> tuple[FinetuneOptions, Path | None, Layout]:
    """The options in force, the folder of the run that is resumed, and how ``world`` processes share the work."""
    layout = Layout.from_command_line(vars(arguments), world)
    if arguments.save_every < 0:
        raise ArgumentError(expected("at least 0", of="--save-every", got=arguments.save_every, do="give a number of steps, or 0 for none"))
    if arguments.resume is None:
        options = FinetuneOptions.from_command_line(vars(arguments))
        check_shares(options, layout)
        return options, None, layout
    if arguments.overwrite:
        raise ArgumentError(expected("--resume or --overwrite", of="a command", got="both", do="go on with the run, or start anew without --resume"))
    folder = Path(arguments.resume)
    saved, done = saved_options(folder)
    options = saved.continued(vars(arguments))
    if options.steps < done:
        raise ArgumentError(expected(f"at least the {done} steps that are done", of="--steps", got=options.steps, do="give a larger number"))
    check_shares(options, layout)
    return options, folder, layout


def _prepared(options: FinetuneOptions, resumed: Path | None, layout: Layout, ranks: Ranks) -> Run:
    """The run as it begins, or goes on."""
    tokenizer = Tokenizer.from_folder(tokenizer_folder(options))
    model = load_model(options, tokenizer)
    data, base = read_data(options, tokenizer), base_files(options)
    rate = Cosine(options.lr, options.warmup, options.decay_steps or options.steps, options.min_lr)
    at_once = options.micro_batch or options.batch // layout.batches
    steps = StepOptions(options.batch, at_once, rate, options.weight_decay, options.clip, seed=options.seed, moments=options.moments)
    done = saved_options(resumed)[1] if resumed is not None else 0
    ranks.begin(layout, facts_of(options, layout, data, base, model, done) if ranks.world > 1 else {}, _SILENCE)
    processes = Processes(ranks.mesh, sequence_parallel=layout.sequence)
    run = Run(options, Trainer(model, data.training, steps, processes), data, base, ranks)
    if resumed is not None:
        run.load(resumed)
    return run


def _trained(run: Run, out: Path, save_every: int, progress: ProgressView, fresh: bool) -> bool:
    """Train up to ``options.steps`` and save; false where Ctrl-C cut it short. ``fresh``: the first save replaces what another left in ``out``."""
    options, record, ranks, replaces, place = run.options, run.record, run.ranks, fresh, run.trainer.model.device
    if ranks.first and fresh:
        run.replaces = seals(out)
    elif ranks.first:
        discard_void(out)

    def save() -> None:
        nonlocal replaces
        ranks.reached(f"the checkpoint of step {run.step}")
        record.peak_memory_bytes = ranks.largest(record.peak_memory_bytes)
        run.save(out)
        if replaces and ranks.first:
            discard_model(out, state=False)
            discard_demo(out)
        replaces = False

    progress.begin(options.recipe, run.step, options.steps, run.trainer.tokens_per_step)
    try:
        with PeakMemory() as memory, Interruption() as interruption:
            while run.step < options.steps and not ranks.any(interruption.asked):
                ranks.reached(f"step {run.step + 1}")
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
    """Two lines on what is trained, on what, with what; and one where the configuration has dropout, which is not applied."""
    options, told = run.options, run.data.described
    count = sum(parameter.numel() for parameter in run.trainer.parameters.values())
    what = f"adapters of rank {options.lora}, {count:,} parameters," if options.lora else f"{count:,} parameters"
    console.print(f"{Path(options.model).name}: {what} on {told['training']['documents']:,} documents of {told['training']['tokens']:,} tokens.")
    work = f"{options.steps} steps of {options.batch} x {options.seq_len} tokens, {run.trainer.options.micro_batch} windows at once"
    place = run.trainer.model.device
    on = f"{torch.get_num_threads()} threads" if place.type == "cpu" else f"on {place}"
    console.print(f"{work}, {options.recipe}, {on}{run.ranks.layout}.")
    if chance := left_to_chance(run.trainer.model.config):
        console.print(f"Not applied in training, of the model's configuration: {', '.join(f'{name} {value:g}' for name, value in chance.items())}.")
