"""A run of one kind of ``fusible train`` that overwrites one of the other: the former is whole until the first save, and gone after it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from counted_kills import COUNTED
from finetune_models import checkpoint, documents, small_run
from safetensors import safe_open

from fusible.cli import folders, main
from fusible.cli.finetuning.run import saved_options
from fusible.cli.run_files import CHECKPOINT, FOLDERS, MANIFEST, MODEL_FILES, MODEL_REPORTS, REPORT_FILES, has_model_run, seals
from fusible.cli.training.layout import load_runs
from fusible.errors import CheckpointError
from fusible.files import held

DEMO = "train --layers 1 --hidden 16 --heads 2 --seq-len 16 --batch 32".split()
KINDS = {"demo": ["--recipe", "delayed"], "recipes": ["--recipe", "bf16,fp32"], "model": [], "adapters": ["--lora", "2", "--merge"]}
OF_MODELS = ("model", "adapters")
OTHERS = [(former, new) for former in KINDS for new in KINDS if (former in OF_MODELS) != (new in OF_MODELS)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint ``base``, documents, and a run of each kind."""
    made = tmp_path_factory.mktemp("kinds")
    checkpoint(made / "base")
    documents(made / "documents.jsonl")
    for kind in KINDS:
        assert main(words(kind, made, made / kind)) == 0
    return made


def words(kind: str, place: Path, out: Path, *more: str) -> list[str]:
    given = small_run(place, out, "--steps", "2") if kind in OF_MODELS else [*DEMO, "--steps", "2", "--out", str(out)]
    return [*given, *KINDS[kind], *more]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def kind_of(out: Path) -> str:
    """What --resume goes on with; what a run wrote at its end is of the same kind."""
    if has_model_run(out):
        with pytest.raises(CheckpointError, match="expected a checkpoint, got none"):
            load_runs(out)
        return "adapters" if saved_options(out)[0].lora else "model"
    with pytest.raises(CheckpointError, match="expected a checkpoint, got none"):
        saved_options(out)
    return "recipes" if len(load_runs(out)[0].recipes) > 1 else "demo"


def metrics_are_of(out: Path, kind: str) -> bool:
    found = json.loads((out / "metrics.json").read_text())
    return "data" in found and bool(found["options"]["lora"]) == (kind == "adapters") if kind in OF_MODELS else "runs" in found


def test_the_files_of_each_kind_are_in_the_lists(place: Path) -> None:
    for kind in KINDS:
        found = set(content(place / kind))
        if kind in OF_MODELS:
            wanted = {f"{CHECKPOINT}/{name}" for name in MODEL_FILES} | {*MODEL_REPORTS}
            assert {name for name in found if name.split("/")[0] not in FOLDERS} == wanted, kind
        else:
            recipes = KINDS[kind][1].split(",") if kind == "recipes" else [""]
            wanted = {f"{recipe}/{name}".lstrip("/") for recipe in recipes for name in ("model.safetensors", "state.safetensors", "state.json")}
            assert found == wanted | {*REPORT_FILES}, kind


@pytest.mark.parametrize(("former", "new"), OTHERS)
def test_a_run_of_the_other_kind_is_refused_and_overwritten_when_asked(former: str, new: str, place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(place / former, out)
    before = content(out)
    assert main(words(new, place, out)) == 2 and content(out) == before
    assert main(words(new, place, out, "--overwrite")) == 0
    assert set(content(out)) == set(content(place / new))
    assert kind_of(out) == new and metrics_are_of(out, new)
    assert main(["train", "--resume", str(out), "--steps", "3"]) == 0
    assert set(content(out)) == set(content(place / new)) and metrics_are_of(out, new)


@pytest.mark.parametrize("name", [f"{CHECKPOINT}/{MANIFEST}", *FOLDERS, *REPORT_FILES])
@pytest.mark.parametrize("new", ["demo", "model"])
def test_one_file_of_a_run_is_a_run_for_either_kind(name: str, new: str, place: Path, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"something of somebody's")
    assert main(words(new, place, tmp_path)) == 2
    assert content(tmp_path) == {name: b"something of somebody's"}


_KILLED = (
    COUNTED
    + """
import shutil
from fusible.cli import main
left = int(sys.argv[1])
os.rename = counted(os.rename)
def begin(*args, rename=os.rename):
    rename(*args)
    os.replace, Path.unlink, shutil.rmtree = counted(os.replace), counted(Path.unlink), counted(shutil.rmtree)
os.rename = begin
raise SystemExit(main(sys.argv[2:]))
"""
)


@pytest.mark.parametrize("moment", [0, 1, 6])
@pytest.mark.parametrize(("former", "new"), [("adapters", "recipes"), ("recipes", "model")])
def test_the_former_run_is_whole_until_the_new_one_is(former: str, new: str, moment: int, place: Path, tmp_path: Path) -> None:
    """Killed before its first save is valid, as it moves files to their places, and as it removes what the former one wrote."""
    out = tmp_path / "out"
    shutil.copytree(place / former, out)
    before = content(out)
    killed = [sys.executable, "-c", _KILLED, str(moment), *words(new, place, out, "--overwrite")]
    assert subprocess.run(killed, env=os.environ, capture_output=True).returncode == -signal.SIGKILL
    if moment == 0:
        assert {name: data for name, data in content(out).items() if ".saving" not in name} == before
    else:
        assert content(out) != before
    left = former if moment == 0 else new
    assert kind_of_what_is_valid(out) == left
    assert main(["train", "--resume", str(out)]) == 0
    assert kind_of(out) == left and metrics_are_of(out, left)
    assert {name for name in content(out) if ".saving" not in name} == set(content(place / left))


def kind_of_what_is_valid(out: Path) -> str:
    """The same where a command was killed: of several recipes it may have the first alone."""
    if has_model_run(out):
        return kind_of(out)
    return "recipes" if (out / "bf16" / "state.json").exists() or (out / "bf16" / ".saved").exists() else kind_of(out)


def test_a_chain_of_overwritten_runs_has_one_that_is_valid(place: Path, tmp_path: Path) -> None:
    """Three manifests that lie side by side, none of which was removed: the last one counts."""
    out = tmp_path / "out"
    shutil.copytree(place / "recipes", out)
    program = [sys.executable, "-c", _KILLED]
    for moment, kind in (("1", "model"), ("1", "demo")):
        assert subprocess.run([*program, moment, *words(kind, place, out, "--overwrite")], env=os.environ, capture_output=True).returncode == -9
    assert len(seals(out)) == 4 and kind_of(out) == "demo"
    assert main(["train", "--resume", str(out)]) == 0
    assert set(content(out)) == set(content(place / "demo")) and kind_of(out) == "demo"


def test_what_generate_reads_is_the_new_run(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    shutil.copytree(place / "demo", out)
    assert main(words("model", place, out, "--overwrite")) == 0
    assert main(["generate", str(out), "--bytes", "3"]) == 2 and "expected a checkpoint, got none" in capsys.readouterr().err
    assert main(["generate", str(out / "model"), "--max-tokens", "3"]) == 0
    assert main(words("demo", place, out, "--overwrite")) == 0
    assert main(["generate", str(out), "--bytes", "3"]) == 0 and not (out / "model").exists()
    with safe_open(out / "model.safetensors", "pt") as found:
        assert "ByteGPT" in found.metadata()["fusible"]


READ = {
    "the model": ("--model", "model", "model"),
    "the tokenizer": ("--tokenizer", "model", "model"),
    "texts": ("--data", "model/documents.jsonl", "model"),
    "held-out texts": ("--eval-data", "adapter/documents.jsonl", "model"),
    "the text": ("--text", "checkpoint/documents.jsonl", "demo"),
}


@pytest.mark.parametrize("linked", [False, True], ids=["as it is", "by a link"])
@pytest.mark.parametrize("read", READ)
def test_a_run_that_would_remove_what_it_reads_is_refused(
    read: str, linked: bool, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option, name, kind = READ[read]
    out = tmp_path / "out"
    for folder in (*FOLDERS, CHECKPOINT):
        checkpoint(out / folder)
        documents(out / folder / "documents.jsonl")
    (tmp_path / "link").symlink_to(out)
    before, named = content(out), str((tmp_path / "link" if linked else out) / name)
    assert main(words(kind, place, out, "--overwrite", option, named)) == 2
    assert f"--out {out}: expected a folder without what {option} names, got {named}" in capsys.readouterr().err
    assert content(out) == before


def test_the_folder_of_a_model_is_none_to_overwrite(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = checkpoint(tmp_path / "base")
    before = content(base)
    assert main(words("model", place, base, "--overwrite", "--model", str(base))) == 2
    assert "without what --model names" in capsys.readouterr().err and content(base) == before
    documents(tmp_path / "documents.jsonl")  # beside what is removed it may lie
    assert main(words("model", place, tmp_path, "--overwrite", "--data", str(tmp_path / "documents.jsonl"))) == 0


@pytest.mark.parametrize("more", [["--overwrite"], ["--resume"], []], ids=["overwritten", "resumed", "new"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_at_once_in_one_folder_are_refused(
    kind: str, more: list[str], place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    if more:
        shutil.copytree(place / kind, out)
    else:
        out.mkdir()
    before = content(out)
    given = ["train", "--resume", str(out), "--steps", "3"] if more == ["--resume"] else words(kind, place, out, *more)
    with held(out) as alone:
        assert alone and main(given) == 2
    assert f"--out {out}: expected a folder to which no other process writes" in capsys.readouterr().err
    assert content(out) == before
    assert main(given) == 0


@pytest.mark.parametrize("kind", ["demo", "model"])
def test_a_run_that_another_saved_meanwhile_is_not_lost(
    kind: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    @contextmanager
    def later(folder: Path) -> Iterator[bool]:
        shutil.copytree(place / kind, folder, dirs_exist_ok=True)
        yield True

    monkeypatch.setattr(folders, "held", later)
    assert main(words(kind, place, out)) == 2
    assert f"--out {out}: expected the runs that were there when this command began" in capsys.readouterr().err
    assert content(out) == content(place / kind)
