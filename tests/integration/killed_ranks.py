"""Processes of ``fusible train`` killed at random moments, as a program: ``killed_ranks.py FOLDER RECIPE SEED KILLS`` prints, as JSON, how many kills
struck what, and the losses of the killed run and of one that nobody killed.

Each part of the run has a layout of its own, and goes on from whatever its predecessor had saved. Processes are forked from one that has loaded all
modules, and are told who they are as ``torchrun`` tells them, whose launcher holds the store by which they meet.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fusible.cli import main
from fusible.cli.training import job, ranks  # noqa: F401  # loaded before processes are forked
from fusible.cli.training.checkpoint import has_checkpoint, read_manifest

LAYOUTS: dict[str, list[str]] = {
    "alone": [],
    "columns": ["--tensor-parallel", "2"],
    "columns and rows": ["--tensor-parallel", "2", "--sequence-parallel"],
    "data": ["--data-parallel", "2"],
    "shards": ["--data-parallel", "2", "--shard-parameters"],
    "tokens": ["--context-parallel", "2"],
    "stages": ["--pipeline-parallel", "2"],
}
RUN = "--layers 1 --hidden 32 --heads 2 --seq-len 16 --batch 4 --save-every 1".split()
MOST = 3
"""A part is killed before its third checkpoint, or about a step later."""
STEPS = 8
"""Of the run for each kill: more than a part takes before it is killed."""
LIMIT = 60.0
"""Seconds in which a process ends that has lost another."""
TIMEOUT = timedelta(seconds=10)
"""After which a process gives up one that does not answer: less than a user's, for some are killed before they meet."""
STORES: list[dist.TCPStore] = []
FIRST = 0.3
"""Seconds within which one is killed that has saved nothing yet."""
_TICK = 0.0005


def start(folder: Path, layout: str, words: list[str]) -> list[int]:
    """The ids of the processes of a command: what they say is in ``folder``, a file for each rank."""
    world = 1 if layout == "alone" else 2
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    STORES.append(store)
    told = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return [_fork(folder / f"rank{rank}", [*words, *LAYOUTS[layout]], {**told, "RANK": str(rank)}) for rank in range(world)]


def _fork(said: Path, words: list[str], told: dict[str, str]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ.update(told)
        ranks._TIMEOUT = TIMEOUT
        warnings.simplefilter("ignore")  # torch's own, of what it will change
        with open(said, "w") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
        with redirect_stdout(io.StringIO()):
            code = main(["train", *words])
    finally:
        os._exit(code)


def ended(processes: list[int], said: Path) -> list[int]:
    """How each has ended: its exit code, or the signal, negative. Raises ``AssertionError`` where one does not within ``LIMIT``."""
    found: dict[int, int] = {}
    began = time.monotonic()
    while len(found) < len(processes):
        for process in processes:
            if process not in found and (reaped := os.waitpid(process, os.WNOHANG))[0]:
                found[process] = os.waitstatus_to_exitcode(reaped[1])
        if time.monotonic() - began > LIMIT:
            for process in set(processes) - set(found):
                os.kill(process, signal.SIGKILL)
            raise AssertionError(f"{len(processes) - len(found)} of {len(processes)} processes wait still; {[p.read_text() for p in said.iterdir()]}")
        time.sleep(0.01)
    return [found[process] for process in processes]


def wait_for(what: Callable[[], bool], processes: list[int], said: Path) -> None:
    began = time.monotonic()
    while not what():
        gone = [process for process in processes if os.waitpid(process, os.WNOHANG)[0]]
        assert not gone and time.monotonic() - began < LIMIT, (gone, [p.read_text() for p in said.iterdir()])
        time.sleep(_TICK)


def steps_saved(out: Path) -> int:
    return read_manifest(out).record.step if has_checkpoint(out) else 0


class Killed:
    """A run in parts. ``found``: how many were killed in which layout, who, and while what was done."""

    def __init__(self, folder: Path, recipe: str, rng: random.Random, steps: int) -> None:
        self.out, self.said, self.rng = folder / "out", folder / "said", rng
        self.begin = ["--recipe", recipe, "--steps", str(steps), *RUN, "--out", str(self.out)]
        self.found: Counter[str] = Counter()
        self.said.mkdir()

    def part(self, layout: str) -> list[int]:
        return start(self.said, layout, ["--resume", str(self.out), "--save-every", "1"] if has_checkpoint(self.out) else self.begin)

    def kill(self, layout: str) -> None:
        """Start a part and kill one of its processes, or all at once, after some checkpoints: at any moment, or when the next is being saved."""
        done, processes = steps_saved(self.out), self.part(layout)
        seal = self.out / "state.json"
        seen = [seal.stat().st_mtime_ns if seal.exists() else 0]

        def saved_again() -> bool:
            now = seal.stat().st_mtime_ns if seal.exists() else 0
            seen.append(now)
            return now != seen[-2]

        pace, began = FIRST, time.monotonic()
        for _ in range(self.rng.randrange(MOST)):
            wait_for(saved_again, processes, self.said)
            pace, began = min(FIRST, time.monotonic() - began), time.monotonic()
        if self.rng.random() < 0.5:
            wait_for((self.out / ".saving").exists, processes, self.said)
            time.sleep(self.rng.uniform(0, 0.004))
        else:
            time.sleep(self.rng.uniform(0, pace))
        victim = self.rng.choice([*processes, None])
        for process in processes if victim is None else [victim]:
            os.kill(process, signal.SIGKILL)
        codes = ended(processes, self.said)
        texts = [(self.said / f"rank{rank}").read_text() for rank in range(len(processes))]
        for process, code, text in zip(processes, codes, texts, strict=True):
            killed = victim in (None, process)
            assert code == (-signal.SIGKILL if killed else 2), (layout, codes, texts)
            assert killed or "expected every process to answer, got nothing from rank " in text.splitlines()[-1], texts
        self.found[layout] += 1
        self.found["all" if victim is None else "one"] += 1
        self.found["while saving" if (self.out / ".saving").exists() else "otherwise"] += 1
        self.found["steps"] += steps_saved(self.out) - done

    def finish(self, layout: str) -> dict[str, Any]:
        processes = self.part(layout)
        codes = ended(processes, self.said)
        assert not any(codes), [p.read_text() for p in self.said.iterdir()]
        (run,) = json.loads((self.out / "metrics.json").read_text())["runs"]
        return {name: run[name] for name in ("loss", "held_out_loss")}


def run(folder: Path, recipe: str, seed: int, kills: int) -> dict[str, Any]:
    rng, steps = random.Random(seed), STEPS * kills
    (folder / "whole").mkdir()
    (folder / "parts").mkdir()
    whole = Killed(folder / "whole", recipe, rng, steps).finish("alone")
    parts = Killed(folder / "parts", recipe, rng, steps)
    layout = ""
    for _ in range(kills):
        layout = rng.choice([name for name in LAYOUTS if name != layout])
        parts.kill(layout)
    layout = rng.choice([name for name in LAYOUTS if name != layout])
    return {"kills": dict(parts.found), "last": layout, "whole": whole, "parts": parts.finish(layout)}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
