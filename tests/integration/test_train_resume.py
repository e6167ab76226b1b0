"""A run that is saved and taken up again is the run that was never interrupted, to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fusible.cli import main

SIZE = "--layers 1 --hidden 16 --heads 2 --seq-len 16 --batch 32".split()
RECIPES = ["bf16", "fp32", "delayed", "current"]


def train_in_a_new_process(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "fusible", "train", *words], env=os.environ, check=True, capture_output=True)


def runs(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "metrics.json").read_text())["runs"]


def assert_same(one: Path, two: Path) -> None:
    """The same weights, scaling state, optimizer state and generator."""
    for name in ("model.safetensors", "state.safetensors"):
        first, second = load_file(one / name), load_file(two / name)
        assert set(first) == set(second)
        assert [key for key in first if not torch.equal(first[key], second[key])] == []


@pytest.mark.parametrize("precision", [[], ["--bf16-layers", "head", "--fp8-format", "e4m3"]], ids=" ".join)
def test_three_steps_and_three_more_in_a_new_process_are_six_steps(tmp_path, precision: list[str]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    chosen = ["--recipe", ",".join(RECIPES), *precision]
    assert main(["train", *SIZE, *chosen, "--steps", "6", "--out", str(whole)]) == 0
    assert main(["train", *SIZE, *chosen, "--steps", "3", "--out", str(parts)]) == 0
    train_in_a_new_process("--resume", str(parts), "--steps", "6")
    for recipe, one, two in zip(RECIPES, runs(whole), runs(parts), strict=True):
        assert (one["recipe"], one["steps"]) == (two["recipe"], two["steps"]) == (recipe, 6)
        assert (one["loss"], one["held_out_loss"]) == (two["loss"], two["held_out_loss"])
        assert_same(whole / recipe, parts / recipe)


_INTERRUPTED = """
import os, signal, sys
from fusible.cli import main
from fusible.cli.training.trainer import Trainer
step, left = Trainer.step, int(sys.argv[1])
def counted(self):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), int(sys.argv[2]))
    return step(self)
Trainer.step = counted
raise SystemExit(main(["train", *sys.argv[3:]]))
"""


def train_and_strike(steps: int, number: int, *words: str) -> subprocess.CompletedProcess:
    """Train in a new process that sends itself the signal ``number`` as a step begins after ``steps`` of them."""
    command = [sys.executable, "-c", _INTERRUPTED, str(steps), str(int(number)), *words]
    return subprocess.run(command, env=os.environ, capture_output=True, text=True)


def test_ctrl_c_saves_and_the_rest_is_as_if_nothing_had_been(tmp_path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    arguments = [*SIZE, "--recipe", "bf16,delayed", "--steps", "4"]
    assert main(["train", *arguments, "--out", str(whole)]) == 0
    ended = train_and_strike(6, signal.SIGINT, *arguments, "--out", str(parts))
    said = f"Interrupted and saved after step 3 of 4 (delayed): go on with 'fusible train --resume {parts}'.\n"
    assert (ended.returncode, ended.stderr) == (130, said)
    assert main(["train", "--resume", str(parts)]) == 0
    assert [run["loss"] for run in runs(whole)] == [run["loss"] for run in runs(parts)]
    for recipe in ("bf16", "delayed"):
        assert_same(whole / recipe, parts / recipe)


def test_a_killed_process_loses_only_what_came_after_the_last_save(tmp_path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    arguments = [*SIZE, "--recipe", "delayed", "--steps", "4"]
    assert main(["train", *arguments, "--out", str(whole)]) == 0
    ended = train_and_strike(3, signal.SIGKILL, *arguments, "--save-every", "2", "--out", str(parts))
    assert ended.returncode == -signal.SIGKILL
    assert len(json.loads((parts / "state.json").read_text())["record"]["loss"]) == 2
    assert main(["train", "--resume", str(parts), "--out", str(tmp_path / "elsewhere")]) == 0
    assert runs(whole)[0]["loss"] == runs(tmp_path / "elsewhere")[0]["loss"]
    assert_same(whole, tmp_path / "elsewhere")
    assert len(json.loads((parts / "state.json").read_text())["record"]["loss"]) == 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    assert main(["train", *SIZE, "--steps", "2", "--out", str(out)]) == 0
    return out


def test_a_finished_run_is_reported_again(finished: Path) -> None:
    before = runs(finished)
    (finished / "metrics.json").unlink()
    assert main(["train", "--resume", str(finished)]) == 0
    assert runs(finished) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--steps", "1"], "--steps: expected at least the 2 steps that are done, got 1; give a larger number."),
        (["--recipe", "delayed"], "--recipe: expected bf16, as the resumed run has it, got delayed; leave it out."),
        (["--hidden", "32"], "--hidden: expected 16, as the resumed run has it, got 32; leave it out."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_resumed_so_is_refused(finished: Path, capsys, words: list[str], sentence: str) -> None:
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    assert main(["train", "--resume", str(finished), *words]) == 2
    assert capsys.readouterr().err == sentence + "\n"
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


def test_a_damaged_checkpoint_is_refused_and_left_as_it_is(finished: Path, tmp_path, capsys) -> None:
    for path in finished.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    model = tmp_path / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["train", "--resume", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert ": expected " in said and "model.safetensors" in said and said.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_checkpoints_of_different_commands_are_not_mixed(finished: Path, tmp_path, capsys) -> None:
    assert main(["train", *SIZE, "--steps", "1", "--recipe", "bf16,fp32", "--out", str(tmp_path)]) == 0
    for name in ("model.safetensors", "state.safetensors", "state.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"--resume {tmp_path}: expected checkpoints of one training command, got another in ")
