"""The folders of a training command's checkpoints: ``DIR`` for one recipe, ``DIR/<recipe>`` for several."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from fusible.cli.run_files import demo_files, demo_places, discard_demo, discard_model, discard_void, has_checkpoint, remove, seals, void_seals
from fusible.cli.training.checkpoint import Checkpoint, Manifest, load_checkpoint, read_manifest, save_checkpoint, save_shards
from fusible.cli.training.options import TrainOptions
from fusible.cli.training.ranks import ALONE, Ranks
from fusible.errors import CheckpointError, expected

__all__ = ["Saves", "load_runs", "run_folder"]


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


class Saves:
    """The checkpoints of one command in ``out``. It resumes those of the recipes ``finished``, and replaces all other runs there, of either kind.

    Of several processes each has one; the first alone removes anything.
    """

    def __init__(self, out: Path, options: TrainOptions, finished: Collection[str], ranks: Ranks = ALONE) -> None:
        self._out, self._options, self._ranks = out, options, ranks
        self._saved = {run_folder(out, options, recipe) for recipe in finished}
        self._replaces = () if finished or not ranks.first else seals(out)
        if finished and ranks.first:  # what was replaced by a process that ended before it removed it
            discard_void(out)

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
                discard_model(self._out)
                discard_demo(self._out, {place})
        self._saved.add(place)


def _discard_stale(place: Path) -> None:
    """Remove what a checkpoint of other processes has left beside the one in ``place``."""
    files = read_manifest(place).files
    for name in demo_files(place)[:-1]:
        if name not in files:
            remove(place, name)


def _valid(folder: Path) -> dict[Path, Manifest]:
    """The manifests in ``folder`` by their places, without those that another one, of either kind, replaces."""
    found = {place: read_manifest(place) for place in demo_places(folder) if has_checkpoint(place)}
    void = void_seals(folder)
    return {place: manifest for place, manifest in found.items() if manifest.seal not in void}
