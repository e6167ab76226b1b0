"""A folder that holds a run is written over by nobody who did not ask for it, and by those who did only once their own run is saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from counted_kills import COUNTED

from fusible.cli import main
from fusible.cli.run_files import CHECKPOINT_FILES, REPORT_FILES
from fusible.cli.training.layout import load_runs

SIZE = "--layers 1 --hidden 16 --heads 2 --seq-len 16 --batch 32".split()
SEVERAL, ONE = "bf16,fp32", "delayed"
REPORTS = ["loss.png", "metrics.json", "pipeline.txt"]


def train(*words: str) -> int:
    return main(["train", *SIZE, *words])


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module", params=[SEVERAL, ONE])
def former(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("former")
    assert train("--steps", "2", "--recipe", request.param, "--out", str(out)) == 0
    return out, request.param


@pytest.fixture
def out(former: tuple[Path, str], tmp_path: Path) -> Path:
    for name, data in content(former[0]).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("recipe", [SEVERAL, ONE, "fp32"])
def test_a_run_is_refused_where_another_lies(out: Path, capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    before = content(out)
    assert train("--steps", "1", "--recipe", recipe, "--out", str(out)) == 2
    said = capsys.readouterr().err
    place = out / "bf16" if (out / "bf16").exists() else out
    do = f"go on with it by --resume {out}, name another folder, or write over it by --overwrite"
    assert said == f"--out {out}: expected a folder without a run, got the run in {place}; {do}.\n"
    assert content(out) == before


@pytest.mark.parametrize("name", CHECKPOINT_FILES + REPORT_FILES)
def test_one_file_of_a_run_is_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"something of somebody's")
    assert train("--steps", "1", "--out", str(tmp_path)) == 2
    assert content(tmp_path) == {name: b"something of somebody's"}


def test_a_run_that_goes_on_elsewhere_is_refused_there_too(out: Path, former: tuple[Path, str]) -> None:
    before = content(out)
    assert train("--resume", str(former[0]), "--steps", "3", "--out", str(out)) == 2
    assert content(out) == before
    assert main(["train", "--resume", str(out), "--overwrite"]) == 2
    assert content(out) == before


@pytest.mark.parametrize("recipe", [SEVERAL, ONE, "fp32"])
def test_what_is_written_over_leaves_nothing(out: Path, recipe: str) -> None:
    assert train("--steps", "1", "--recipe", recipe, "--out", str(out), "--overwrite") == 0
    places = [""] if "," not in recipe else [f"{name}/" for name in recipe.split(",")]
    files = [place + name for place in places for name in CHECKPOINT_FILES]
    assert sorted(content(out)) == sorted([*files, *REPORTS])
    options, checkpoints = load_runs(out)
    assert options.recipes == tuple(recipe.split(",")) == tuple(checkpoints)


_KILLED = (
    COUNTED
    + """
from fusible.cli import main
left = int(sys.argv[1])
os.rename, os.replace, Path.unlink = counted(os.rename), counted(os.replace), counted(Path.unlink)
raise SystemExit(main(["train", *sys.argv[2:]]))
"""
)


def overwrite_and_die(folder: Path, moment: int) -> int:
    words = [*SIZE, "--steps", "1", "--recipe", "current" if (folder / "state.json").exists() else "fp32,bf16", "--out", str(folder), "--overwrite"]
    return subprocess.run([sys.executable, "-c", _KILLED, str(moment), *words], env=os.environ, capture_output=True).returncode


@pytest.mark.parametrize("moment", [0, 1, 5])
def test_the_former_run_is_whole_until_the_new_one_is(out: Path, former: tuple[Path, str], moment: int) -> None:
    """Killed before its first save is valid, as it moves the files to their places, and as it removes the former ones."""
    saved = content(out)
    assert overwrite_and_die(out, moment) == -signal.SIGKILL
    options, checkpoints = load_runs(out)
    if moment == 0:
        assert options.recipes == tuple(former[1].split(",")) == tuple(checkpoints)
        assert {name: data for name, data in content(out).items() if ".saving" not in name} == saved
    else:
        assert options.recipes != tuple(former[1].split(",")) and len(checkpoints) == 1
    assert main(["train", "--resume", str(out)]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert [run["recipe"] for run in metrics["runs"]] == list(options.recipes)
    assert load_runs(out)[0].recipes == options.recipes and not list(out.rglob(".sav*"))


def test_a_recipe_that_is_not_there_yet_starts_when_the_others_go_on(former: tuple[Path, str], out: Path) -> None:
    if former[1] != SEVERAL:
        pytest.skip("of several recipes")
    for name in CHECKPOINT_FILES:
        (out / "fp32" / name).unlink()
    assert main(["train", "--resume", str(out)]) == 0
    assert set(load_runs(out)[1]) == {"bf16", "fp32"}
