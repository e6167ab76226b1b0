"""Processes of ``fusible train`` killed at random moments, as a program: ``killed_ranks.py FOLDER RECIPE SEED KILLS`` prints, as JSON, how many kills
struck what, and the losses of the killed run and of one that nobody killed.

Each part of the run has a layout of its own, and goes on from whatever its predecessor had saved.
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

from forked_ranks import exit_codes, start

from fusible.cli.run_files import has_checkpoint
from fusible.cli.training.checkpoint import read_manifest

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
SOON = "from datetime import timedelta\nfrom fusible.cli.training import ranks\nranks._TIMEOUT = timedelta(seconds=10)"
"""After that a process gives up one that does not answer: it is less than a user's, for some are killed before they meet."""
FIRST = 0.3
"""Seconds within which one is killed that has saved nothing yet."""
_TICK = 0.0005


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

    def part(self, layout: str) -> list[int]:
        words = ["--resume", str(self.out), "--save-every", "1"] if has_checkpoint(self.out) else self.begin
        return start(self.said, [[*words, *LAYOUTS[layout]]] * (1 if layout == "alone" else 2), code=SOON)

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
        codes = exit_codes(processes, LIMIT)
        texts = [(self.said / f"rank{rank}.err").read_text() for rank in range(len(processes))]
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
        codes = exit_codes(processes, LIMIT)
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
