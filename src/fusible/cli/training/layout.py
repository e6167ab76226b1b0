"""The folders of a training command's checkpoints: ``DIR`` for one recipe, ``DIR/<recipe>`` for several.

A command that overwrites another's files leaves them whole until its own first checkpoint is complete. That checkpoint names the seals of those that
it replaces, so the rename that makes it valid also makes them void, wherever they are. Only then are they removed.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from fusible.cli.training.checkpoint import (
    Checkpoint,
    Manifest,
    files_of_checkpoints,
    has_checkpoint,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    save_shards,
)
from fusible.cli.training.options import RECIPES, TrainOptions
from fusible.cli.training.ranks import ALONE, Ranks
from fusible.errors import ArgumentError, CheckpointError, expected
from fusible.files import locate

__all__ = ["REPORT_FILES", "Saves", "check_free", "load_runs", "run_folder"]

REPORT_FILES = ("metrics.json", "loss.png", "pipeline.txt")


def run_folder(out: Path, options: TrainOptions, recipe: str) -> Path:
    """The folder of one recipe's checkpoint."""
    return out if len(options.recipes) == 1 else out / recipe


def load_runs(folder: Path, option: str = "--resume") -> tuple[TrainOptions, dict[str, Checkpoint]]:
    """The options of the training command whose files are in ``folder``, and the checkpoint of each recipe that has one.

    ``option`` is what the user named the folder by. Raises ``CheckpointError`` where there is none, where one is damaged, or where they do not
    belong together.
    """
    manifests = _valid(folder)
    if not manifests:
        raise CheckpointError(expected("a checkpoint", of=f"{option} {folder}", got="none", do="name the --out of a run that was saved"))
    options = [manifest.options for manifest in manifests.values()]
    steps = max(option.steps for option in options)
    common = replace(options[0], steps=steps)
    for place, manifest in manifests.items():
        here = replace(manifest.options, steps=steps, text=common.text)
        if here != common or manifest.recipe not in common.recipes or run_folder(folder, common, manifest.recipe) != place:
            raise CheckpointError(
                expected("checkpoints of one training command", of=f"{option} {folder}", got=f"another in {place}", do="remove one")
            )
    return common, {manifest.recipe: load_checkpoint(place, manifest) for place, manifest in manifests.items()}


def check_free(out: Path) -> None:
    """Raises ``ArgumentError`` if ``out`` has a run's checkpoint or report: a new command would overwrite it."""
    places = [place for place in _places(out) if has_checkpoint(place)]
    places += [out / name for name in REPORT_FILES if not places and os.path.lexists(locate(out, name))]
    if places:
        do = f"go on with it by --resume {out}, name another folder, or write over it by --overwrite"
        raise ArgumentError(expected("a folder without a run", of=f"--out {out}", got=f"the run in {places[0]}", do=do))


class Saves:
    """The checkpoints of one command in ``out``. It resumes those of the recipes ``finished``, and replaces all others there.

    Of several processes each has one; the first alone removes anything.
    """

    def __init__(self, out: Path, options: TrainOptions, finished: Collection[str], ranks: Ranks = ALONE) -> None:
        self._out, self._options, self._ranks = out, options, ranks
        self._saved = {run_folder(out, options, recipe) for recipe in finished}
        self._replaces = () if finished or not ranks.first else _seals(out)
        if finished and ranks.first:  # checkpoints that were replaced by a process that ended before it removed them
            _discard_runs(out, self._saved, reports=False)

    def save(self, checkpoint: Checkpoint) -> None:
        """Save a recipe's checkpoint. After the first one, remove those that it replaces."""
        place = run_folder(self._out, self._options, checkpoint.recipe)
        checkpoint = replace(checkpoint, replaces=self._replaces)
        if checkpoint.shards is None:
            save_checkpoint(place, checkpoint)
        else:
            save_shards(place, checkpoint, self._ranks)
        if self._ranks.first:
            _discard_stale(place)
            if not self._saved:
                _discard_runs(self._out, {place}, reports=True)
        self._saved.add(place)


def _seals(folder: Path) -> tuple[str, ...]:
    """The seals of the checkpoints in ``folder``. Those that cannot be read are left out."""
    found = []
    for place in _places(folder):
        try:
            found += [read_manifest(place).seal] if has_checkpoint(place) else []
        except CheckpointError:
            continue
    return tuple(found)


def _discard_runs(folder: Path, keep: Collection[Path], reports: bool) -> None:
    """Remove the checkpoints in ``folder`` except those in the places ``keep``, and the reports where asked to.

    The manifest of a checkpoint is removed last: as long as other files are there, it says that they were replaced.
    """
    for place in _places(folder):
        for name in files_of_checkpoints(place) if place not in keep else ():
            _remove(place, name)
    for name in REPORT_FILES if reports else ():
        _remove(folder, name)


def _discard_stale(place: Path) -> None:
    """Remove what a checkpoint of other processes has left beside the one in ``place``."""
    files = read_manifest(place).files
    for name in files_of_checkpoints(place)[:-1]:
        if name not in files:
            _remove(place, name)


def _remove(place: Path, name: str) -> None:
    while os.path.lexists(path := locate(place, name)):
        path.unlink()


def _places(folder: Path) -> tuple[Path, ...]:
    return (folder, *(folder / recipe for recipe in RECIPES))


def _valid(folder: Path) -> dict[Path, Manifest]:
    """The manifests in ``folder`` by their places, without those that another one replaces."""
    found = {place: read_manifest(place) for place in _places(folder) if has_checkpoint(place)}
    void = {seal for manifest in found.values() for seal in manifest.replaces}
    return {place: manifest for place, manifest in found.items() if manifest.seal not in void}
