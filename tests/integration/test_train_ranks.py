"""``fusible train`` under ``torchrun``: whatever the layout, the losses of one process; and a run goes on in any other layout."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fusible.cli.training.layout import load_runs

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


def ranks(folder: Path, *options: list[str], code: str = "", ends: str = "") -> list[tuple[int, str]]:
    """The exit code of each of two processes, and what it says: ``options`` of each, and Python code that it runs before the command. With ``ends``
    the second is killed when the first has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = f"import sys\n{code}\nfrom fusible.cli import main\nsys.exit(main(sys.argv[1:]))"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, "train", *RUN, "--steps", "2", *own],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**common, "RANK": str(rank)},
        )
        for rank, own in enumerate(options)
    ]  # fmt: skip
    said = [started[0].communicate(timeout=120)[1]]
    if ends:
        started[1].kill()
    said.append(started[1].communicate(timeout=120)[1])
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


@pytest.mark.parametrize(
    ("own", "names"),
    [(["--seed", "1"], "seed"), (["--recipe", "bf16"], "recipes"), (["--data-parallel", "1", "--tensor-parallel", "2"], "layout")],
    ids=["seed", "recipe", "layout"],
)
def test_processes_that_disagree_are_told_before_the_first_step(own: list[str], names: str, tmp_path: Path) -> None:
    first, second = ranks(tmp_path, ["--out", "a"], ["--out", "b", *own])
    for rank, (code, said) in enumerate((first, second)):
        sentence = f"rank 1: expected what rank 0 has, got another {names} (rank {rank} has {names} "
        assert code == 2 and said.endswith("start all ranks by one command, on one version.\n") and sentence in said, said
    assert not list(tmp_path.glob("*/*")), "nothing was written"


def test_a_loss_that_is_not_finite_ends_all_and_says_where(tmp_path: Path) -> None:
    """One process alone has a weight that is NaN; gradients are not summed before the loss is looked at."""
    code = (
        "import os, torch\nfrom fusible.cli.training.ranks import Ranks\nlay_out = Ranks.lay_out\n"
        "def spoiled(self, model):\n    called = lay_out(self, model)\n"
        "    if self.rank == 1:\n        with torch.no_grad():\n            next(model.parameters()).fill_(float('nan'))\n    return called\n"
        "Ranks.lay_out = spoiled"
    )
    for code_, said in ranks(tmp_path, ["--out", "a"], ["--out", "a"], code=code):
        assert code_ == 2 and "step 1 (fp32) on rank 1: expected a finite loss, got nan; lower --lr." in said, said


@pytest.mark.parametrize(
    ("place", "call", "name", "saved"),
    [("trainer.Trainer._step", 2, "model.safetensors", 1), ("job.write_reports", 1, "loss.png", 2)],
    ids=["a checkpoint", "the reports"],
)
def test_a_disk_that_is_full_for_one_ends_all_with_its_reason(place: str, call: int, name: str, saved: int, tmp_path: Path) -> None:
    """The first process saves, at first with room for it. The others would wait for it in the next step, or end as if all were well."""
    code = (
        "import os, resource\nfrom fusible.cli.training import job, trainer\n"
        f"last, calls = {place}, []\n"
        "def with_little_room(*args):\n"
        "    calls.append(args)\n"
        f"    if os.environ['RANK'] == '0' and len(calls) == {call}:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))\n"
        "    return last(*args)\n"
        f"{place} = with_little_room"
    )
    own = ["--out", "a", "--recipe", "fp32", "--save-every", "1"]
    first, second = ranks(tmp_path, own, own, code=code)
    reason = f"{name} in {tmp_path / 'a'}: expected room and permission to write, got File too large; make room there, or name another folder.\n"
    assert first == (2, reason) and second == (2, f"rank 1: as rank 0 says, {reason}")
    assert load_runs(tmp_path / "a")[1]["fp32"].record.step == saved and not list(tmp_path.rglob(".sav*"))


def test_a_process_that_does_not_come_is_named(tmp_path: Path) -> None:
    """One is refused by what it alone finds, and says so; the other says whom it waited for."""
    (tmp_path / "text").write_bytes(b"abc " * 1000)
    code = "from datetime import timedelta\nfrom fusible.cli.training import ranks\nranks._TIMEOUT = timedelta(seconds=5)"
    (code_, said), (other, theirs) = ranks(tmp_path, ["--out", "a", "--text", "text"], ["--out", "a", "--text", "none"], code=code)
    assert (code_, other) == (2, 2) and theirs.startswith("rank 1: --text ") and theirs.count("\n") == 1
    assert said.startswith("rank 0: expected to meet the other 1 of 2, got ") and said.count("\n") == 1, said


GONE = {
    "killed": ("os.kill(os.getpid(), 9)", "nothing from rank 1, which was last at step 2 (fp32)"),
    "asleep": ("time.sleep(60)", "nothing from rank 1, which was last at step 2 (fp32)"),
    "an error of its own": ("raise ValueError('a bad batch')", "nothing from rank 1, which was last at step 2 (fp32)"),
}


@pytest.mark.parametrize("what", GONE)
def test_who_does_not_answer_is_named_by_the_others(what: str, tmp_path: Path) -> None:
    code = (
        "import os, time, datetime\nfrom fusible.cli.training import ranks, trainer\nranks._TIMEOUT = datetime.timedelta(seconds=5)\n"
        "step = trainer.Trainer._step\n"
        "def gone(self):\n"
        f"    if self._ranks.rank == 1 and self.record.step == 1:\n        {GONE[what][0]}\n"
        "    return step(self)\n"
        "trainer.Trainer._step = gone"
    )
    (code_, said), (other, theirs) = ranks(tmp_path, ["--out", "a"], ["--out", "a"], code=code, ends="killed" if what == "asleep" else "")
    assert code_ == 2 and said.count("\n") == 1 and said.startswith("rank 0 at step 2 (fp32): expected every process to answer, got "), said
    assert GONE[what][1] in said and said.endswith("go on from the last checkpoint by --resume.\n"), said
    assert other != 0 and (what != "an error of its own" or "ValueError: a bad batch" in theirs)


def test_a_launcher_that_ends_one_process_has_all_save_and_stop(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom fusible.cli.training import trainer\nstep = trainer.Trainer._step\n"
        "def ended(self):\n"
        "    if self._ranks.rank == 1:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return step(self)\n"
        "trainer.Trainer._step = ended"
    )
    (code_, said), (other, theirs) = ranks(tmp_path, ["--out", "a"], ["--out", "a"], code=code)
    assert (code_, other) == (130, 130) and theirs == ""
    assert said == "Interrupted and saved after step 1 of 2 (fp32): go on with 'fusible train --resume a'.\n"
    train(tmp_path, 1, ["--resume", "a"])
    assert [len(run["loss"]) for run in runs(tmp_path / "a").values()] == [2, 2]
