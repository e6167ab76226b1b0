"""``fusible train``: one run per recipe, then the reports."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fusible import __version__
from fusible.cli.console import make_console
from fusible.cli.folders import held_out_folder, make_out_folder
from fusible.cli.run_files import check_apart, check_free, check_same_runs, seals
from fusible.cli.training.checkpoint import Checkpoint
from fusible.cli.training.interruption import Interruption
from fusible.cli.training.layout import Saves, load_runs
from fusible.cli.training.memory import PeakMemory, check_memory
from fusible.cli.training.options import TrainOptions
from fusible.cli.training.progress import ProgressView, make_progress
from fusible.cli.training.ranks import Layout, Ranks, together
from fusible.cli.training.report import print_summary, run_report, write_reports
from fusible.cli.training.text import Text, read_text
from fusible.cli.training.trainer import Trainer
from fusible.errors import ArgumentError, FusibleError, expected

__all__ = ["train"]

_OUT = "out/train"
_INTERRUPTED, _REFUSED = 130, 2


def train(arguments: argparse.Namespace) -> int:
    """The job of ``fusible train``; every option and every checkpoint is checked before anything is written, or sent to another process."""
    with ExitStack() as until_the_end:
        return together(lambda ranks: _train(arguments, ranks, until_the_end))


def _train(arguments: argparse.Namespace, ranks: Ranks, until_the_end: ExitStack) -> int:
    try:
        options, checkpoints, layout = _begin(arguments, ranks.world)
        out, goes_on = _checked_out(arguments, options)
        found = seals(out)
    except FusibleError:
        if ranks.first:
            raise
        return _REFUSED  # each process finds the same in what it was told, and the first says it
    for recipe in options.recipes:
        check_memory(options, recipe)
    text = read_text(options.text, options.seq_len)
    for checkpoint in checkpoints.values():
        Trainer.resumed(checkpoint, options, text)
    make_out_folder(out)
    ranks.begin(layout, _facts(options, layout, text, checkpoints))
    with ranks.telling():
        if ranks.first:
            until_the_end.enter_context(held_out_folder(out))
            check_same_runs(out, found, arguments.overwrite)
    saves = Saves(out, options, checkpoints if goes_on else (), ranks)
    console = make_console(None if ranks.first else StringIO())
    progress = make_progress(console)
    runs: list[dict[str, Any]] = []
    plans: dict[str, str] = {}
    for recipe in options.recipes:
        trainer = Trainer(options, recipe, text, ranks, checkpoints.get(recipe))
        if not runs:
            _announce(console, trainer, ranks)
        if not _run(trainer, saves, arguments.save_every, progress, ranks):
            if ranks.first:
                place = f"step {trainer.record.step} of {options.steps} ({recipe})"
                print(f"Interrupted and saved after {place}: go on with 'fusible train --resume {out}'.", file=sys.stderr)
            return _INTERRUPTED
        runs.append(run_report(trainer, trainer.held_out_loss()))
        plans[recipe] = trainer.explain()
    with ranks.telling():
        if ranks.first:
            write_reports(out, options, text, runs, plans)
    if ranks.first:
        print_summary(console, out, text, runs)
    return 0


def _begin(arguments: argparse.Namespace, world: int) -> tuple[TrainOptions, dict[str, Checkpoint], Layout]:
    """The options in force, for a resumed command the checkpoint of each recipe that has one, and how ``world`` processes share the work."""
    layout = Layout.from_command_line(vars(arguments), world)
    if arguments.save_every < 0:
        raise ArgumentError(expected("at least 0", of="--save-every", got=arguments.save_every, do="give a number of steps, or 0 for none"))
    if arguments.resume is not None and arguments.overwrite:
        raise ArgumentError(expected("--resume or --overwrite", of="a command", got="both", do="go on with the run, or start anew without --resume"))
    if arguments.resume is None:
        options = TrainOptions.from_command_line(vars(arguments))
        layout.check(options)
        return options, {}, layout
    saved, checkpoints = load_runs(Path(arguments.resume))
    options = saved.continued(vars(arguments))
    done = max(checkpoint.record.step for checkpoint in checkpoints.values())
    if options.steps < done:
        raise ArgumentError(expected(f"at least the {done} steps that are done", of="--steps", got=options.steps, do="give a larger number"))
    layout.check(options)
    return options, checkpoints, layout


def _checked_out(arguments: argparse.Namespace, options: TrainOptions) -> tuple[Path, bool]:
    """Where to write, and whether that goes on with the run there. Raises ``ArgumentError`` for a folder to which a run is not to write."""
    out = Path(arguments.out or arguments.resume or _OUT)
    goes_on = arguments.resume is not None and out.resolve() == Path(arguments.resume).resolve()
    if not goes_on and not arguments.overwrite:
        check_free(out)
    if not goes_on and options.text is not None:
        check_apart(out, [("--text", Path(options.text))])
    return out, goes_on


def _facts(options: TrainOptions, layout: Layout, text: Text, checkpoints: Mapping[str, Checkpoint]) -> dict[str, str]:
    """What every process of the command must have alike, each as a text that can be shown."""
    fixed = {name: str(value) for name, value in vars(options).items() if name != "text"}
    done = ", ".join(f"{recipe} {checkpoint.record.step}" for recipe, checkpoint in checkpoints.items()) or "none"
    versions = {"version of fusible": __version__, "version of torch": torch.__version__}
    return {**versions, **fixed, "layout": repr(layout), "text": text.sha256, "steps that are done": done}


def _run(trainer: Trainer, saves: Saves, save_every: int, progress: ProgressView, ranks: Ranks) -> bool:
    """Train up to ``options.steps`` and save; false where Ctrl-C, in any process, cut it short."""
    record, options = trainer.record, trainer.options
    progress.begin(trainer.recipe, record.step, options.steps, options.batch * options.seq_len)
    try:
        with PeakMemory() as memory, Interruption() as interruption:
            while record.step < options.steps and not ranks.any(interruption.asked):
                ranks.reached(f"step {record.step + 1} ({trainer.recipe})")
                progress.step(trainer.step())
                record.peak_memory_bytes = max(record.peak_memory_bytes, memory.peak)
                if save_every and record.step % save_every == 0 and record.step < options.steps:
                    _save(trainer, saves, ranks)
    finally:
        progress.end()
    record.peak_memory_bytes = ranks.largest(record.peak_memory_bytes)
    _save(trainer, saves, ranks)
    return record.step == options.steps


def _save(trainer: Trainer, saves: Saves, ranks: Ranks) -> None:
    ranks.reached(f"the checkpoint of step {trainer.record.step} ({trainer.recipe})")
    saves.save(trainer.checkpoint())


def _announce(console: Console, trainer: Trainer, ranks: Ranks) -> None:
    """One line on what is trained, on what, with what."""
    options, text = trainer.options, trainer.text.describe()
    model = f"A byte-level GPT of {trainer.parameters:,} parameters ({options.layers} layers, {options.hidden} wide)"
    work = f"{options.steps} steps of {options.batch} x {options.seq_len} bytes, {options.executor}, {torch.get_num_threads()} threads{ranks.layout}"
    console.print(f"{model} learns {text['source']} ({text['bytes']:,} bytes): {work}.")
