"""Processes killed while they write checkpoints, as a program: ``killed_checkpoints.py FOLDER SEED KILLS`` prints what the kills left, as JSON.

A child writes one checkpoint after another until it is killed at a moment that the seed draws. Each that has its name is whole then, and what the
last one had written beside its place is swept by the next that is written there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fusible.models.checkpoints import open_checkpoint, write_checkpoint

CONFIG: dict[str, Any] = {"model_type": "llama"}
LONGEST = 0.05
"""Seconds until the kill, once a checkpoint is there: several more."""


def tensors(number: int) -> dict[str, torch.Tensor]:
    return {f"t{place}": torch.full((200 + place, 3), float(number)) for place in range(40)}


def write(folder: Path, number: int) -> None:
    write_checkpoint(folder / str(number), CONFIG, tensors(number), shard_size=30_000)


def kill_while_writing(folder: Path, seconds: float) -> None:
    child = os.fork()
    if not child:
        for number in count():
            write(folder, number)
    while not (folder / "0").exists():
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main(root: Path, seed: int, kills: int) -> dict[str, int]:
    """How the folders were found."""
    rng, found = random.Random(seed), Counter[str]()
    for kill in range(kills):
        folder = root / str(kill)
        folder.mkdir(parents=True)
        kill_while_writing(folder, rng.uniform(0, LONGEST))
        whole = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        assert set(whole) == {str(number) for number in range(len(whole))}, whole
        for name in whole:
            checkpoint, wanted = open_checkpoint(folder / name), tensors(int(name))
            assert dict(checkpoint.config) == CONFIG and set(checkpoint) == set(wanted)
            assert all(torch.equal(checkpoint[each], tensor) for each, tensor in wanted.items())
        left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert all(name.startswith(f".{len(whole)}.") and name.endswith(".saving") for name in left), left
        found["whole"] += len(whole)
        found["left in the middle"] += bool(left)
        write(folder, len(whole))
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        assert set(open_checkpoint(folder / str(len(whole)))) == set(tensors(0))
    return dict(found)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
