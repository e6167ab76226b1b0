"""A run after some steps: what trains, its record, and how both are saved and resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusible.cli.finetuning.data import Data
from fusible.cli.finetuning.options import FinetuneOptions
from fusible.cli.run_files import CHECKPOINT, MANIFEST, MODEL_FILES, has_model_run
from fusible.cli.training.ranks import ALONE, Ranks
from fusible.cli.training.record import Record
from fusible.cli.training.shards import Shards, fingerprint_of, save_together
from fusible.errors import CheckpointError, expected
from fusible.models.training import Trainer, load_run, read_manifest, save_run
from fusible.models.training.saved_run import file_pieces, sealed

__all__ = ["Run", "saved_options"]


_FORMAT = {"format": "fusible train --model", "version": 1}
_PARAMETERS, _STATE, _ = MODEL_FILES
_OF_FILES = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""Entries of a configuration that say how a checkpoint was written, and nothing of what the model computes."""


@dataclass
class Run:
    """``base``: the SHA-256 of the files of frozen weights, by name; empty where all are trained. ``evaluations``: steps and losses. ``replaces``:
    the seals of the runs that it overwrites.

    Of several processes each has one, all of whose methods are called in every process alike."""

    options: FinetuneOptions
    trainer: Trainer
    data: Data
    base: Mapping[str, str]
    ranks: Ranks = ALONE
    record: Record = field(default_factory=Record)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    replaces: tuple[str, ...] = ()
    _steady: bool = False

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self.record.step

    def advance(self) -> float:
        """Take a step and return its loss."""
        began = time.perf_counter()
        loss = self.trainer.step()
        self.record.add(loss, time.perf_counter() - began, steady=self._steady)
        self._steady = True
        return loss

    def evaluate(self) -> float | None:
        """The loss on what is held out, after as many steps as are done; None where nothing is. Computed once."""
        if self.data.held_out is None:
            return None
        if not self.evaluations or self.evaluations[-1][0] != self.step:
            self.evaluations.append((self.step, self.trainer.evaluate(self.data.held_out)))
        return self.evaluations[-1][1]

    def save(self, out: Path) -> None:
        """Write the state into ``out/checkpoint``, in the place of the former one."""
        said: dict[str, Any] = {**_FORMAT, "options": self.options.to_json(), "data": self.data.described, "base": dict(self.base)}
        said["config"] = self._config()
        told = {"record": self.record.to_json(), "evaluations": self.evaluations}
        if self.replaces:
            said["replaces"] = list(self.replaces)
        if self.trainer.processes.divided:
            self._save_together(out / CHECKPOINT, {**said, **told})
            return
        parameters, state = self.trainer.state()
        with self.ranks.telling():
            if self.ranks.first:
                save_run(out / CHECKPOINT, {**said, **told}, {_PARAMETERS: parameters, _STATE: state})

    def _save_together(self, folder: Path, said: Mapping[str, Any]) -> None:
        trainer = self.trainer
        rest = b"".join(file_pieces(trainer.rest()))

        def others(files: dict[str, Any]) -> dict[str, bytes]:
            return {_STATE: rest, MANIFEST: sealed(said, {**files, _STATE: fingerprint_of(rest)})}

        save_together(folder, Shards(trainer.model, trainer.parameters, trainer.moments()), self.ranks, _STATE, others)

    def load(self, out: Path) -> None:
        """Go on from the state in ``out/checkpoint``. Raises ``CheckpointError`` where it does not fit, before anything is changed."""
        manifest = _manifest(out)
        self.data.check_same(manifest.get("data"))
        if manifest.get("base") != dict(self.base):
            do = "name the same model with --model"
            raise CheckpointError(expected("the weights beneath its adapters as they were", of="a resumed run", got="others", do=do))
        _check_config(manifest.get("config"), self._config())
        record, evaluations = Record.from_json(manifest["record"]), [(int(step), float(loss)) for step, loss in manifest["evaluations"]]
        self.trainer.load_state(*Trainer.parted(load_run(out / CHECKPOINT, manifest)), record.step)
        self.record, self.evaluations = record, evaluations

    def _config(self) -> dict[str, str]:
        """What of the model's configuration a run that is resumed has to have again: the values by name, as JSON, which may have infinities."""
        return {name: json.dumps(value, sort_keys=True) for name, value in self.trainer.model.config.items() if name not in _OF_FILES}


def saved_options(out: Path) -> tuple[FinetuneOptions, int]:
    """The options of the run in ``out``, and how many steps it has done. Raises ``CheckpointError`` where there is none."""
    if not has_model_run(out):
        do = "name the --out of a run that was saved"
        raise CheckpointError(expected("a checkpoint", of=f"--resume {out}", got="none", do=do))
    manifest = _manifest(out)
    return FinetuneOptions.from_json(manifest["options"]), Record.from_json(manifest["record"]).step


def _check_config(saved: Any, now: Mapping[str, str]) -> None:
    """Raise ``CheckpointError`` unless a model is configured as that of a saved run, which is None where its version did not save that."""
    if saved is None or saved == now:
        return
    name = min(name for name in {*saved, *now} if saved.get(name) != now.get(name))
    wanted, got = f"{name} {saved.get(name, 'none')} in the model's configuration, as it was", now.get(name, "none")
    raise CheckpointError(expected(wanted, of="a resumed run", got=got, do="name the same model with --model"))


def _manifest(out: Path) -> dict[str, Any]:
    manifest = read_manifest(out / CHECKPOINT)
    if any(manifest.get(key) != value for key, value in _FORMAT.items()):
        got = f"{manifest.get('format')!r} version {manifest.get('version')!r}"
        raise CheckpointError(expected("a run of 'fusible train --model'", of=str(out / CHECKPOINT), got=got, do="use the program that saved it"))
    return manifest
