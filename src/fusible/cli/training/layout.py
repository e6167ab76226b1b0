"""Where the checkpoints of a training command lie: in ``DIR`` for one recipe, in ``DIR/<recipe>`` for several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fusible.cli.training.checkpoint import CHECKPOINT_FILES, Checkpoint, has_checkpoint, load_checkpoint
from fusible.cli.training.files import locate
from fusible.cli.training.options import RECIPES, TrainOptions
from fusible.errors import CheckpointError, expected

__all__ = ["discard_runs", "load_runs", "run_folder"]


def run_folder(out: Path, options: TrainOptions, recipe: str) -> Path:
    """Where the checkpoint of one recipe's run lies."""
    return out if len(options.recipes) == 1 else out / recipe


def load_runs(folder: Path, option: str = "--resume") -> tuple[TrainOptions, dict[str, Checkpoint]]:
    """The options of the training command whose files are in ``folder``, and the checkpoint of each recipe that has one.

    ``option`` is what the user named the folder by. Raises ``CheckpointError`` where there is none, where one is damaged, or where they do not
    belong together.
    """
    places = [place for place in (folder, *(folder / recipe for recipe in RECIPES)) if has_checkpoint(place)]
    if not places:
        raise CheckpointError(expected("a checkpoint", of=f"{option} {folder}", got="none", do="name the --out of a run that was saved"))
    checkpoints = {place: load_checkpoint(place) for place in places}
    options = [checkpoint.options for checkpoint in checkpoints.values()]
    steps = max(option.steps for option in options)
    common = replace(options[0], steps=steps)
    for place, checkpoint in checkpoints.items():
        here = replace(checkpoint.options, steps=steps, text=common.text)
        if here != common or checkpoint.recipe not in common.recipes or run_folder(folder, common, checkpoint.recipe) != place:
            raise CheckpointError(
                expected("checkpoints of one training command", of=f"{option} {folder}", got=f"another in {place}", do="remove one")
            )
    return common, {checkpoint.recipe: checkpoint for checkpoint in checkpoints.values()}


def discard_runs(folder: Path) -> None:
    """Remove the checkpoints of a former command from ``folder``, since a new one starts there."""
    for place in (folder, *(folder / recipe for recipe in RECIPES)):
        for name in CHECKPOINT_FILES:
            while (path := locate(place, name)).exists():
                path.unlink()
