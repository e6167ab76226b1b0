"""``fusible train`` killed again and again, one process or all, within steps and within saves: each time it goes on in another layout, and its end is
that of a run that nobody killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("killed_ranks.py")
RELATIVE = {"fp32": 1e-5, "delayed": 1e-2}
"""Layouts add up in other orders. In fp32 that is a few times 2^-24 of each gradient, which Adam's steps carry on without enlarging it so far; in
8 bits a number that is next to the middle between two others may be rounded the other way."""


@pytest.mark.parametrize(
    ("recipe", "seed", "kills"), [("fp32", 0, 3), *(pytest.param(r, s, 20, marks=pytest.mark.slow) for r, s in (("fp32", 1), ("delayed", 2)))]
)
def test_a_run_that_is_killed_ends_as_one_that_is_not(tmp_path: Path, recipe: str, seed: int, kills: int) -> None:
    command = [sys.executable, str(PROGRAM), str(tmp_path), recipe, str(seed), str(kills)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout)
    print(f"seed {seed}: {found['kills']}, and to the end by {found['last']}")
    assert found["kills"]["one"] + found["kills"].get("all", 0) == kills
    whole, parts = ([*found[run]["loss"], found[run]["held_out_loss"]] for run in ("whole", "parts"))
    assert torch.allclose(torch.tensor(parts), torch.tensor(whole), rtol=RELATIVE[recipe], atol=0)
    assert parts != whole, "some layouts add up in another order: two equal runs would be one and the same"
