"""Processes killed while they save, as a program: ``killed_saves.py FOLDER SEED KILLS`` prints how each kind of file was found, as JSON.

A child saves two contents by turns, without a pause, until it is killed at a moment that the seed draws. What is read then is one of the two, whole.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusible import lazy
from fusible.cli.training.checkpoint import save_checkpoint
from fusible.cli.training.layout import load_runs
from fusible.cli.training.options import TrainOptions
from fusible.cli.training.text import read_text
from fusible.cli.training.trainer import Trainer
from fusible.files import locate, replace_file, replace_files

OPTIONS = TrainOptions(recipes=("delayed",), steps=4, layers=1, hidden=32, heads=2, seq_len=8, batch=2)
LONGEST = 0.03
"""Seconds until the kill: several saves."""

Saves = tuple[Callable[[], None], Callable[[], None]]


def checkpoints(folder: Path) -> tuple[Saves, Callable[[], Any]]:
    text = read_text(None, OPTIONS.seq_len)
    made = []
    for _ in range(2):
        trainer = Trainer(OPTIONS, "delayed", text)
        for _ in range(len(made) + 1):
            trainer.step()
        made.append(trainer.checkpoint())
    models = [{name: tensor.clone() for name, tensor in each.model.items()} for each in made]

    def read() -> int:
        checkpoint = load_runs(folder)[1]["delayed"]
        step = checkpoint.record.step
        wanted = models[step - 1]
        assert set(wanted) == set(checkpoint.model) and all(torch.equal(wanted[name], checkpoint.model[name]) for name in wanted)
        assert all(int(tensor) == step for name, tensor in checkpoint.state.items() if name.endswith(".step"))
        return step

    return (lambda: save_checkpoint(folder, made[0]), lambda: save_checkpoint(folder, made[1])), read


def executables(folder: Path) -> tuple[Saves, Callable[[], Any]]:
    """The bytes are made before: what compiles has threads, which a forked child lacks."""
    infos = [lazy.InputInfo((3,), lazy.float32)]
    contents = []
    for factor in (1.0, 2.0):
        constant = lazy.Tensor(np.full((3,), factor, np.float32))
        lazy.compile(lambda x, constant=constant: x * constant, args=infos).save(folder / "program")
        contents.append((folder / "program").read_bytes())

    def read() -> int:
        assert (folder / "program").read_bytes() in contents
        return int(lazy.Executable.load(folder / "program")(np.ones(3, np.float32)).tolist()[0])

    return (lambda: replace_file(folder / "program", contents[0]), lambda: replace_file(folder / "program", contents[1])), read


def reports(folder: Path) -> tuple[Saves, Callable[[], Any]]:
    contents = [{name: f"{name} {i}".encode() * 5000 for name in ("metrics.json", "loss.png", "pipeline.txt")} for i in (1, 2)]

    def read() -> int:
        found = {name: locate(folder, name).read_bytes() for name in contents[0]}
        return contents.index(found) + 1

    return (lambda: replace_files(folder, contents[0]), lambda: replace_files(folder, contents[1])), read


def kill_while_saving(saves: Saves, seconds: float) -> None:
    child = os.fork()
    if not child:
        while True:
            for save in saves:
                save()
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status


def main(root: Path, seed: int, kills: int) -> dict[str, int]:
    """How the folders were found: by what was read, and by what the kill left lying."""
    rng, found = random.Random(seed), Counter[str]()
    kinds = {"checkpoint": checkpoints, "executable": executables, "reports": reports}
    made = {}
    for name, make in kinds.items():
        (root / name).mkdir(parents=True)
        made[name] = make(root / name)
        made[name][0][0]()
    for kill in range(kills):
        name = list(kinds)[kill % len(kinds)]
        saves, read = made[name]
        kill_while_saving(saves, rng.uniform(0, LONGEST))
        left = [path.name for path in (root / name).iterdir() if path.name.startswith(".")]
        content = read()
        assert content in (1, 2)
        found[f"{name}: {content}"] += 1
        found["left in the middle"] += bool(left)
        saves[kill // 3 % 2]()
        assert read() == kill // 3 % 2 + 1, name
        for path in (root / name).glob(".*.saving"):  # of a process that is no more: its number is in the name
            path.unlink()
        assert not [path for path in (root / name).iterdir() if path.name.startswith(".")]
    return dict(found)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
