"""``fusible train`` under ``torchrun``: whatever the layout, the losses of one process; and a run goes on in any other layout."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import Launcher

from fusible.cli.training.layout import load_runs

RUN = "--recipe fp32,delayed --layers 2 --hidden 64 --heads 4 --seq-len 64 --batch 8".split()
STAGES = ["--pipeline-parallel", "2"]
EXPERTS, SHARED = [*RUN, "--experts", "4"], ["--expert-parallel", "2"]
STEPS, LONG = 7, 20
LAYOUTS = {
    "columns": (2, ["--tensor-parallel", "2"]),
    "columns and rows": (2, ["--tensor-parallel", "2", "--sequence-parallel"]),
    "data": (2, []),
    "shards": (2, ["--shard-parameters"]),
    "columns x shards": (4, ["--tensor-parallel", "2", "--shard-parameters"]),
    "tokens": (2, ["--context-parallel", "2", "--context-way", "ring"]),
}
STAGED = {
    "stages": (2, [*STAGES, "--microbatches", "4"]),
    "stages x columns and rows": (4, [*STAGES, "--tensor-parallel", "2", "--sequence-parallel"]),
    "stages x data": (4, STAGES),
    "stages x shards": (4, [*STAGES, "--shard-parameters"]),
    "stages x tokens": (4, [*STAGES, "--context-parallel", "2"]),
}
LAUNCHER = Launcher()
FAST = ("stages x columns and rows",)
"""Of these what every run of the tests looks at."""


@pytest.fixture(scope="module", autouse=True)
def launched() -> Iterator[None]:
    with LAUNCHER:
        yield


def train(folder: Path, processes: int, options: list[str]) -> str:
    """What the command says."""
    ended = LAUNCHER.run(folder, [options] * processes)
    said = "".join(text for _, *texts in ended for text in texts)
    assert not any(code for code, *_ in ended), said
    return said


UNDER_TORCHRUN = """\
import atexit
import os
from pathlib import Path

def look():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    Path(f"threads{os.environ['RANK']}").write_text("".join(name for name in names if "gloo" in name))

atexit.register(look)  # before all others are, and so called after them
from fusible.cli import main
raise SystemExit(main())
"""


def under_torchrun(folder: Path, processes: int, options: list[str]) -> str:
    """The same, by the launcher itself. No thread of a group outlives the command: one that drops a tensor while the interpreter is taken down would
    abort the process."""
    (folder / "program.py").write_text(UNDER_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "program.py", "train", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert [(folder / f"threads{rank}").read_text() for rank in range(processes)] == [""] * processes
    return done.stdout + done.stderr


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    return {run["recipe"]: run for run in json.loads((folder / "metrics.json").read_text())["runs"]}


def saved(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of the checkpoint of each recipe in ``folder``."""
    return {recipe: {**checkpoint.model, **checkpoint.state} for recipe, checkpoint in load_runs(folder)[1].items()}


def same(found: dict[str, dict[str, torch.Tensor]], wanted: dict[str, dict[str, torch.Tensor]]) -> bool:
    """To the bit."""
    names = {recipe: tensors.keys() for recipe, tensors in wanted.items()}
    assert {recipe: tensors.keys() for recipe, tensors in found.items()} == names
    return all(torch.equal(tensor, wanted[recipe][name]) for recipe in found for name, tensor in found[recipe].items())


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """What one process makes of some steps."""

    @functools.cache
    def trained(steps: int) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        train(folder, 1, [*RUN, "--steps", str(steps), "--out", "out"])
        return folder / "out"

    return trained


@pytest.fixture(scope="module")
def alone(one_process: Callable[[int], Path]) -> dict[str, dict[str, Any]]:
    return runs(one_process(STEPS))


NEAR = {"fp32": 1e-5, "delayed": 1e-2, "current": 1e-2, "mxfp8": 1e-2}


def near(found: dict[str, dict[str, Any]], wanted: dict[str, dict[str, Any]]) -> None:
    assert found.keys() == wanted.keys()
    for recipe in wanted:
        relative = NEAR[recipe]
        assert len(found[recipe]["loss"]) == len(wanted[recipe]["loss"])
        assert torch.allclose(torch.tensor(found[recipe]["loss"]), torch.tensor(wanted[recipe]["loss"]), rtol=relative, atol=0)
        assert found[recipe]["held_out_loss"] == pytest.approx(wanted[recipe]["held_out_loss"], rel=relative)


@pytest.mark.parametrize("layout", ["columns and rows", "data", "columns x shards", "tokens"])
def test_a_layout_has_the_losses_of_one_process(alone: dict[str, dict[str, Any]], layout: str, tmp_path: Path) -> None:
    processes, options = LAYOUTS[layout]
    start = under_torchrun if layout == "data" else train
    said = start(tmp_path, processes, [*RUN, *options, "--steps", str(STEPS), "--out", "out"])
    near(runs(tmp_path / "out"), alone)
    lines = [line for line in said.splitlines() if line.startswith("fp32") and "step" in line]
    assert len(lines) == STEPS, "one process alone shows the progress"
    assert "in each of" in said and (tmp_path / "out" / "loss.png").exists()
    plan = (tmp_path / "out" / "pipeline.txt").read_text()
    assert ("between processes, forward" in plan) == (layout != "data")


@pytest.mark.parametrize(("executor", "layout"), [("eager", "shards"), ("xla", "shards"), ("eager", "columns x shards")])
def test_shards_that_are_gathered_in_8_bits_have_the_losses_of_one_process(executor: str, layout: str, tmp_path: Path) -> None:
    """And go on: in one process, and in two that have whole weights."""
    run = [*RUN, "--recipe", "current,mxfp8", "--executor", executor]
    processes, options = LAYOUTS[layout]
    train(tmp_path, 1, [*run, "--steps", "4", "--out", "alone"])
    train(tmp_path, processes, [*run, *options, "--steps", "2", "--out", "out"])
    for processes, step in ((1, 3), (2, 4)):
        train(tmp_path, processes, ["--resume", "out", "--steps", str(step)])
    near(runs(tmp_path / "out"), runs(tmp_path / "alone"))


def test_a_run_goes_on_in_every_layout(alone: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """A step in each, and the last in one process. What is loaded is what was saved, to the bit: so says a run that is resumed for no step."""
    for step, (processes, options) in enumerate([*LAYOUTS.values(), (1, [])], 1):
        begin = [*RUN, "--out", "out"] if step == 1 else ["--resume", "out"]
        train(tmp_path, processes, [*begin, *options, "--steps", str(step)])
        before = saved(tmp_path / "out")
        if step in (2, 4):  # laid out by columns and rows, and as shards
            train(tmp_path, processes, ["--resume", "out", *options, "--steps", str(step)])
            assert same(saved(tmp_path / "out"), before)
    near(runs(tmp_path / "out"), alone)
    text = subprocess.run(
        [sys.executable, "-m", "fusible", "generate", "out", "--recipe", "delayed", "--bytes", "4"], cwd=tmp_path, capture_output=True
    )
    assert text.returncode == 0, text.stderr


@pytest.mark.parametrize(
    ("layout", "steps"),
    [*((name, STEPS) for name in FAST), *(pytest.param(name, LONG, marks=pytest.mark.slow) for name in STAGED)],
)
def test_in_stages_it_is_one_process(one_process: Callable[[int], Path], layout: str, steps: int, tmp_path: Path) -> None:
    """Its losses; and what is saved by the names of one process: in fp32 parameters and moments, which tell by which norm gradients were clipped. A
    gradient is a sum over 512 bytes in another order, of which moments keep a tenth of each step's."""
    processes, options = STAGED[layout]
    said = train(tmp_path, processes, [*RUN, *options, "--steps", str(steps), "--out", "out"])
    found, wanted = runs(tmp_path / "out"), runs(one_process(steps))
    near(found, wanted)
    for recipe, run in wanted.items():
        assert (found[recipe]["matrix_products"], found[recipe]["gemms"]) == (run["matrix_products"], run["gemms"])
    assert f"stages, {4 if layout == 'stages' else 2} microbatches" in said
    plan = (tmp_path / "out" / "pipeline.txt").read_text()
    windows = 8 // (4 if layout in ("stages", "stages x data", "stages x shards") else 2)
    nbytes = windows * (32 if layout == "stages x tokens" else 64) * 64 * 4
    assert plan.count("stage 2 of 2") == 2 and f"between stages: {nbytes:,} bytes of y" in plan
    tensors, others = saved(tmp_path / "out"), saved(one_process(steps))
    assert {recipe: held.keys() for recipe, held in tensors.items()} == {recipe: held.keys() for recipe, held in others.items()}
    for recipe, held in others.items():
        for name, tensor in held.items():
            assert tensors[recipe][name].shape == tensor.shape, name
            if recipe == "fp32" and tensor.is_floating_point():
                assert (tensors[recipe][name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def test_experts_that_processes_share_out_are_those_of_one(tmp_path: Path) -> None:
    """The losses of one process; and a run that was saved and resumed is, to the bit, the run that was not: what experts of other processes have been
    like is in the checkpoint, too."""
    train(tmp_path, 1, [*EXPERTS, "--steps", str(STEPS), "--out", "alone"])
    said = train(tmp_path, 2, [*EXPERTS, *SHARED, "--steps", str(STEPS), "--out", "at once"])
    assert "(experts) processes" in said and "SendTokens" in (tmp_path / "at once" / "pipeline.txt").read_text()
    near(runs(tmp_path / "at once"), runs(tmp_path / "alone"))
    train(tmp_path, 2, [*EXPERTS, *SHARED, "--steps", "3", "--out", "resumed"])
    train(tmp_path, 2, ["--resume", "resumed", *SHARED, "--steps", str(STEPS)])
    assert [r["loss"] for r in runs(tmp_path / "resumed").values()] == [r["loss"] for r in runs(tmp_path / "at once").values()]
    assert same(saved(tmp_path / "resumed"), saved(tmp_path / "at once"))


BESIDE = {
    "rows": (2, ["--tensor-parallel", "2", "--sequence-parallel"], "SendTokens"),
    "columns": (2, ["--tensor-parallel", "2"], "DispatchTokens"),
    "tokens": (2, ["--context-parallel", "2"], "DispatchTokens"),
    "experts x rows": (4, [*SHARED, "--tensor-parallel", "2", "--sequence-parallel"], "SendTokens"),
    "experts x columns": (4, [*SHARED, "--tensor-parallel", "2"], "SendTokens"),
    "experts x tokens": (4, [*SHARED, "--context-parallel", "2", "--context-way", "ring"], "SendTokens"),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if of[0] > 2 or name == "columns" else ()) for name, of in BESIDE.items()]
)
def test_a_mixture_is_laid_out_along_every_dimension(layout: str, tmp_path: Path) -> None:
    """The losses of one process, in which the run goes on."""
    processes, options, sent = BESIDE[layout]
    train(tmp_path, 1, [*EXPERTS, "--steps", str(STEPS), "--out", "alone"])
    train(tmp_path, processes, [*EXPERTS, *options, "--steps", "4", "--out", "out"])
    assert sent in (tmp_path / "out" / "pipeline.txt").read_text()
    train(tmp_path, 1, ["--resume", "out", "--steps", str(STEPS)])
    near(runs(tmp_path / "out"), runs(tmp_path / "alone"))


@pytest.mark.slow
def test_experts_go_on_in_stages_as_shards_and_in_one_process(tmp_path: Path) -> None:
    train(tmp_path, 1, [*EXPERTS, "--steps", str(STEPS), "--out", "alone"])
    train(tmp_path, 4, [*EXPERTS, *SHARED, *STAGES, "--steps", "3", "--out", "out"])
    train(tmp_path, 4, ["--resume", "out", *SHARED, "--shard-parameters", "--steps", "5"])
    train(tmp_path, 1, ["--resume", "out", "--steps", str(STEPS)])
    near(runs(tmp_path / "out"), runs(tmp_path / "alone"))


def test_a_run_goes_on_in_stages_and_in_one_process_again(alone: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """What is loaded is what was saved, to the bit, scales included: so say runs that are resumed for no step."""
    train(tmp_path, 1, [*RUN, "--out", "out", "--steps", "2"])
    for done, step, processes, options in ((2, 4, 3, ["--pipeline-parallel", "3", "--microbatches", "4"]), (4, STEPS, 1, [])):
        before = saved(tmp_path / "out")
        train(tmp_path, processes, ["--resume", "out", *options, "--steps", str(done)])
        assert same(saved(tmp_path / "out"), before), f"in {processes} stages"
        train(tmp_path, processes, ["--resume", "out", *options, "--steps", str(step)])
    near(runs(tmp_path / "out"), alone)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--tensor-parallel", "3"],
            "the number of processes: expected the 2 that were started, got --pipeline-parallel 1 x --expert-parallel 1 x --tensor-parallel 3 x "
            "--context-parallel 1 x --data-parallel 1, 3 in all; start so many by torchrun --nproc-per-node 3, or change one of them.",
        ),
        (["--expert-parallel", "2"], "--expert-parallel: expected --experts, got none; give a number of experts, or leave it out"),
        (["--expert-parallel", "2", "--experts", "3"], "--experts: expected a multiple of 2, the processes that share it, got 3"),
        (
            ["--experts", "3", "--tensor-parallel", "2", "--sequence-parallel"],
            "--experts: expected a multiple of 2, the processes that share it, got 3",
        ),
        (["--experts", "4", "--top-k", "5"], "--top-k: expected at most the 4 experts, got 5; choose another"),
        (["--experts", "4", "--executor", "xla"], "--executor with --experts: expected eager, got xla"),
        (["--experts", "4", "--bf16-layers", "first,head"], "--bf16-layers with --experts: expected head alone, got first"),
        (["--tensor-parallel", "2", "--heads", "1"], "--heads: expected a multiple of 2, the processes that share it, got 1"),
        (["--batch", "7"], "--batch: expected a multiple of 2, the processes that share it, got 7"),
        (["--sequence-parallel"], "--sequence-parallel: expected --tensor-parallel of 2 at least, got 1"),
        (["--tensor-parallel", "2", "--shard-parameters"], "--shard-parameters: expected --data-parallel of 2 at least, got 1"),
        *(
            (
                [f"--{along}-parallel", "2", "--executor", "xla"],
                "--executor with --tensor-parallel, --context-parallel or --pipeline-parallel: expected eager, got xla",
            )
            for along in ("tensor", "pipeline")
        ),
        ([*STAGES, "--batch", "7"], "--batch of a process: expected a multiple of the 2 microbatches, got 7"),
        ([*STAGES, "--microbatches", "1"], "--microbatches: expected at least 2, the stages that work on them, got 1"),
        (["--microbatches", "2"], "--microbatches: expected --pipeline-parallel of 2 at least, got 1"),
        (
            [*STAGES, "--recipe", "fp32,mxfp8", "--batch", "4", "--microbatches", "4", "--seq-len", "16"],
            "--batch times --seq-len of a microbatch: expected a multiple of 32, the block of mxfp8, got 16",
        ),
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


def test_more_stages_than_blocks_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from fusible.cli import main

    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["train", "--pipeline-parallel", "3", "--layers", "1"]) == 2
    wanted = (
        "--pipeline-parallel: expected at most 2, the blocks of attention and of products in --layers 1, got 3; give more layers, or fewer stages.\n"
    )
    assert capsys.readouterr().err == wanted


def ranks(folder: Path, *options: list[str], code: str = "", ends: str = "") -> list[tuple[int, str]]:
    """The exit code of each of two processes, and what it says: ``options`` of each, and Python code that it runs before the command. With ``ends``
    the second is killed when the first has ended."""
    ended = LAUNCHER.run(folder, [[*RUN, "--steps", "2", *own] for own in options], code=code, kill_last=bool(ends))
    return [(code, said) for code, _, said in ended]


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


@pytest.mark.parametrize("own", [[], STAGES], ids=["data", "stages"])
def test_a_loss_that_is_not_finite_ends_all_and_says_where(own: list[str], tmp_path: Path) -> None:
    """One process alone has a weight that is NaN; gradients are not summed before the loss is looked at. In stages it is in the last one."""
    code = (
        "import os, torch\nfrom fusible.cli.training.ranks import Ranks\nlay_out = Ranks.lay_out\n"
        "def spoiled(self, model):\n    called = lay_out(self, model)\n"
        "    if self.rank == 1:\n        with torch.no_grad():\n            list(model.parameters())[-1].fill_(float('nan'))\n    return called\n"
        "Ranks.lay_out = spoiled"
    )
    for code_, said in ranks(tmp_path, ["--out", "a", *own], ["--out", "a", *own], code=code):
        assert code_ == 2 and "step 1 (fp32) on rank 1: expected a finite loss, got nan; lower --lr." in said, said


@pytest.mark.parametrize(
    ("rank", "place", "call", "name", "saved"),
    [
        (0, "trainer.Trainer._step", 2, "a shard in {}/.saving", 1),
        (1, "trainer.Trainer._step", 2, "a shard in {}/.saving", 1),
        (0, "job.write_reports", 1, "loss.png in {}", 2),
    ],
    ids=["a checkpoint, the first", "a checkpoint, the second", "the reports"],
)
def test_a_disk_that_is_full_for_one_ends_all_with_its_reason(rank: int, place: str, call: int, name: str, saved: int, tmp_path: Path) -> None:
    """At first there is room. The others would wait for it in the next step, or end as if all were well."""
    code = (
        "import os, resource\nfrom fusible.cli.training import job, trainer\n"
        f"last, calls = {place}, []\n"
        "def with_little_room(*args):\n"
        "    calls.append(args)\n"
        f"    if os.environ['RANK'] == '{rank}' and len(calls) == {call}:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))\n"
        "    return last(*args)\n"
        f"{place} = with_little_room"
    )
    own = ["--out", "a", "--recipe", "fp32", "--save-every", "1"]
    reason = f"{name.format(tmp_path / 'a')}: expected room and permission to write, got File too large; make room there, or name another folder.\n"
    said = [reason if each == rank else f"as rank {rank} says, {reason}" for each in range(2)]
    assert ranks(tmp_path, own, own, code=code) == [(2, said[0]), (2, f"rank 1: {said[1]}")]
    assert load_runs(tmp_path / "a")[1]["fp32"].record.step == saved and not list(tmp_path.rglob(".sav*"))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("", "rank 0 at the start: expected every process to answer, got nothing from rank 1, which has not come ("),
        ("import os\nos.environ.update(TORCHELASTIC_USE_AGENT_STORE='False', MASTER_PORT='0')", "rank 0: expected to meet the other 1 of 2, got "),
    ],
    ids=["the launcher has the store", "rank 0 has it"],
)
def test_a_process_that_does_not_come_is_named(more: str, sentence: str, tmp_path: Path) -> None:
    """One is refused by what it alone finds, and says so; the other says whom it waited for."""
    (tmp_path / "text").write_bytes(b"abc " * 1000)
    code = f"{more}\nfrom datetime import timedelta\nfrom fusible.cli.training import ranks\nranks._TIMEOUT = timedelta(seconds=5)"
    (code_, said), (other, theirs) = ranks(tmp_path, ["--out", "a", "--text", "text"], ["--out", "a", "--text", "none"], code=code)
    assert (code_, other) == (2, 2) and theirs.startswith("rank 1: --text ") and theirs.count("\n") == 1
    assert said.splitlines()[-1].startswith(sentence) and "Traceback" not in said, said


GONE = {
    "killed": ("os.kill(os.getpid(), 9)", "nothing from rank 1, which was last at step 2 (fp32)"),
    "asleep": ("time.sleep(60)", "nothing from rank 1, which was last at step 2 (fp32)"),
    "an error of its own": ("raise ValueError('a bad batch')", "nothing from rank 1, which was last at step 2 (fp32)"),
}


@pytest.mark.parametrize(("what", "own"), [*((what, []) for what in GONE), ("killed", STAGES), ("asleep", STAGES)])
def test_who_does_not_answer_is_named_by_the_others(what: str, own: list[str], tmp_path: Path) -> None:
    code = (
        "import os, time, datetime\nfrom fusible.cli.training import ranks, trainer\nranks._TIMEOUT = datetime.timedelta(seconds=5)\n"
        "step = trainer.Trainer._step\n"
        "def gone(self):\n"
        f"    if self._ranks.rank == 1 and self.record.step == 1:\n        {GONE[what][0]}\n"
        "    return step(self)\n"
        "trainer.Trainer._step = gone"
    )
    given = ["--out", "a", *own]
    (code_, said), (other, theirs) = ranks(tmp_path, given, given, code=code, ends="killed" if what == "asleep" else "")
    assert code_ == 2 and said.count("\n") == 1 and said.startswith("rank 0 at step 2 (fp32): expected every process to answer, got "), said
    assert GONE[what][1] in said and said.endswith("go on from the last checkpoint by --resume.\n"), said
    assert other != 0 and (what != "an error of its own" or "ValueError: a bad batch" in theirs)


def test_what_a_stage_refuses_is_said_as_it_is(tmp_path: Path) -> None:
    """torch's schedule has another error around it."""
    code = (
        "from fusible.cli.training.model import Stage\nfrom fusible.errors import ShapeError\n"
        "def refuse(self, x):\n    raise ShapeError('x: expected another, got this; give that.')\n"
        "Stage.forward = refuse"
    )
    (code_, said), (other, theirs) = ranks(tmp_path, ["--out", "a", *STAGES], ["--out", "a", *STAGES], code=code)
    assert (code_, said) == (2, "x: expected another, got this; give that.\n")
    assert other == 2 and "expected every process to answer" in theirs


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
