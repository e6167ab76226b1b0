"""``fusible train`` under ``torchrun``: whatever the layout, the losses of one process; and a run goes on in any other layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

RUN = "--recipe fp32,delayed --layers 2 --hidden 64 --heads 4 --seq-len 64 --batch 8".split()
STEPS = 7
LAYOUTS = {
    "columns": (2, ["--tensor-parallel", "2"]),
    "columns and rows": (2, ["--tensor-parallel", "2", "--sequence-parallel"]),
    "data": (2, []),
    "shards": (2, ["--shard-parameters"]),
    "columns x shards": (4, ["--tensor-parallel", "2", "--shard-parameters"]),
    "tokens": (2, ["--context-parallel", "2", "--context-way", "ring"]),
}


def train(folder: Path, processes: int, options: list[str], code: int = 0) -> str:
    """What the command says."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, "-m", "fusible", "train", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode == 0) == (code == 0), done.stderr
    return done.stdout + done.stderr


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    return {run["recipe"]: run for run in json.loads((folder / "metrics.json").read_text())["runs"]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    train(folder, 1, [*RUN, "--steps", str(STEPS), "--out", "out"])
    return runs(folder / "out")


def near(found: dict[str, dict[str, Any]], wanted: dict[str, dict[str, Any]]) -> None:
    for recipe, relative in (("fp32", 1e-5), ("delayed", 1e-2)):
        assert len(found[recipe]["loss"]) == STEPS
        assert torch.allclose(torch.tensor(found[recipe]["loss"]), torch.tensor(wanted[recipe]["loss"]), rtol=relative, atol=0)
        assert found[recipe]["held_out_loss"] == pytest.approx(wanted[recipe]["held_out_loss"], rel=relative)


@pytest.mark.parametrize("layout", ["columns and rows", "data", "columns x shards", "tokens"])
def test_a_layout_has_the_losses_of_one_process(alone: dict[str, dict[str, Any]], layout: str, tmp_path: Path) -> None:
    processes, options = LAYOUTS[layout]
    said = train(tmp_path, processes, [*RUN, *options, "--steps", str(STEPS), "--out", "out"])
    near(runs(tmp_path / "out"), alone)
    lines = [line for line in said.splitlines() if line.startswith("fp32") and "step" in line]
    assert len(lines) == STEPS, "one process alone shows the progress"
    assert "in each of" in said and (tmp_path / "out" / "loss.png").exists()
    plan = (tmp_path / "out" / "pipeline.txt").read_text()
    assert ("between processes, forward" in plan) == (layout != "data")


def test_a_run_goes_on_in_every_layout(alone: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """A step in each, and the last in one process. What is loaded is what was saved, to the bit: so says a run that is resumed for no step."""
    for step, (processes, options) in enumerate([*LAYOUTS.values(), (1, [])], 1):
        begin = [*RUN, "--out", "out"] if step == 1 else ["--resume", "out"]
        train(tmp_path, processes, [*begin, *options, "--steps", str(step)])
        saved = {path.relative_to(tmp_path): load_file(path) for path in sorted(tmp_path.glob("out/*/*.safetensors"))}
        if step in (2, 4):  # laid out by columns and rows, and as shards
            train(tmp_path, processes, ["--resume", "out", *options, "--steps", str(step)])
            again = {path: load_file(tmp_path / path) for path in saved}
            assert all(torch.equal(saved[path][name], again[path][name]) for path in saved for name in (saved[path] | again[path]))
    near(runs(tmp_path / "out"), alone)
    text = subprocess.run(
        [sys.executable, "-m", "fusible", "generate", "out", "--recipe", "delayed", "--bytes", "4"], cwd=tmp_path, capture_output=True
    )
    assert text.returncode == 0, text.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--tensor-parallel", "3"],
            "the number of processes: expected the 2 that were started, got --tensor-parallel 3 x --context-parallel 1 x --data-parallel 1, 3 in all",
        ),
        (["--tensor-parallel", "2", "--heads", "1"], "--heads: expected a multiple of 2, the processes that share it, got 1"),
        (["--batch", "7"], "--batch: expected a multiple of 2, the processes that share it, got 7"),
        (["--sequence-parallel"], "--sequence-parallel: expected --tensor-parallel of 2 at least, got 1"),
        (["--tensor-parallel", "2", "--shard-parameters"], "--shard-parameters: expected --data-parallel of 2 at least, got 1"),
        (["--tensor-parallel", "2", "--executor", "xla"], "--executor with --tensor-parallel or --context-parallel: expected eager, got xla"),
        (["--context-parallel", "2", "--seq-len", "66"], "--seq-len: expected a multiple of 4, the processes that share it, got 66"),
        (["--tensor-parallel", "0"], "--tensor-parallel: expected at least 1, got 0"),
    ],
)
def test_what_does_not_fit_is_said_once_before_the_processes_meet(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: nobody else is there to be waited for."""
    from fusible.cli import main

    for rank in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", "2")
            assert main(["train", *options]) == 2
        said = capsys.readouterr().err
        assert said.startswith(sentence) and said.count("\n") == 1 if rank == 0 else said == ""
