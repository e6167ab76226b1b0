"""A disk that is full, and what else the system refuses: at every call that writes the sentence names the file, and the old files are whole."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusible
from fusible import lazy
from fusible.cli.training.checkpoint import save_checkpoint
from fusible.cli.training.layout import load_runs
from fusible.cli.training.options import TrainOptions
from fusible.cli.training.report import write_reports
from fusible.cli.training.text import read_text
from fusible.cli.training.trainer import Trainer
from fusible.errors import FileError
from fusible.files import writing
from fusible.lazy.evaluation import binary_cache
from fusible.models.checkpoints import write_checkpoint
from fusible.models.training import add_adapters, save_adapters, save_run

OPTIONS = TrainOptions(recipes=("bf16",), steps=4, layers=1, hidden=8, heads=2, seq_len=8, batch=2)
TEXT = read_text(None, OPTIONS.seq_len)
PROGRAM = lazy.compile(lambda x: x * lazy.Tensor(np.arange(3, dtype=np.float32)), args=[lazy.InputInfo((3,), lazy.float32)])


def checkpoint(folder: Path) -> None:
    trainer = Trainer(OPTIONS, "bf16", TEXT)
    save_checkpoint(folder, trainer.checkpoint())


def reports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusible.cli.training.report.draw_losses", lambda *_: b"a picture")
    write_reports(folder, OPTIONS, TEXT, [], {"bf16": "a plan"})


@contextmanager
def refusing(at: int, code: int) -> Iterator[Callable[[], bool]]:
    """The ``at``-th call of the system that writes raises the error ``code``; a write of data writes some first."""
    left = [at]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(code, os.strerror(code))
            return function(*args, **kwargs)

        return call

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            left[0] -= 1
            if left[0] == -1:
                super().write(data[: len(data) // 2])
                raise OSError(code, os.strerror(code))
            return super().write(data)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writing, "open", counted(lambda path, mode, buffering=-1: File(path, mode)), raising=False)
        for name in ("fsync", "rename", "replace"):
            patched.setattr(os, name, counted(getattr(os, name)))
        patched.setattr(Path, "mkdir", counted(Path.mkdir))
        yield lambda: left[0] < 0


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


WRITERS: dict[str, tuple[Callable[..., None], list[str]]] = {
    "checkpoint": (lambda folder, _: checkpoint(folder), ["model.safetensors", "state.json", "state.safetensors"]),
    "reports": (reports, ["loss.png", "metrics.json", "pipeline.txt"]),
    "executable": (lambda folder, _: PROGRAM.save(folder / "program"), ["program"]),
    "figures": (lambda folder, _: writing.replace_file(folder / "bench.json", b"{}"), ["bench.json"]),
}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", WRITERS)
def test_every_call_of_the_system_may_be_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    write, files = WRITERS[name]
    write(tmp_path, monkeypatch)
    before = content(tmp_path)
    assert sorted(before) == files
    for at in range(60):
        with refusing(at, code) as was_refused:
            try:
                write(tmp_path, monkeypatch)
            except FileError as error:
                said = str(error).splitlines()[-1]
            else:
                break
        assert was_refused() and said.count(": expected room and permission to write") == 1
        assert os.strerror(code) in said and str(tmp_path) in said, said
        assert any(file in said for file in files) or "the folder" in said, said
        assert ("make room" in said) == (code in (errno.ENOSPC, errno.EDQUOT))
        found = {file: writing.locate(tmp_path, file).read_bytes() for file in files}
        assert {file: len(data) for file, data in found.items()} == {file: len(data) for file, data in before.items()}
        assert not list(tmp_path.glob(".*.saving"))
    assert 4 <= at < 60
    assert sorted(content(tmp_path)) == files and not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


MODEL = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TENSORS = {"a": torch.arange(3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.zeros(4, 4)}


def adapters(folder: Path) -> None:
    model = fusible.from_config({**MODEL, "max_position_embeddings": 16})
    add_adapters(model, rank=2, alpha=2.0)
    save_adapters(model, folder, base="a model")


NEW_FOLDERS: dict[str, Callable[[Path], None]] = {
    "a file": lambda folder: write_checkpoint(folder, MODEL, TENSORS),
    "several files": lambda folder: write_checkpoint(folder, MODEL, TENSORS, shard_size=30),
    "a model": lambda folder: fusible.save_pretrained(fusible.from_config({**MODEL, "max_position_embeddings": 16}), folder),
    "adapters": adapters,
    "a run": lambda folder: save_run(folder, {"of": "a test"}, {"parameters.safetensors": TENSORS, "state.safetensors": TENSORS}),
}


@pytest.mark.parametrize("name", NEW_FOLDERS)
def test_every_call_for_a_new_folder_may_be_refused(tmp_path: Path, name: str) -> None:
    write, left = NEW_FOLDERS[name], list[set[str]]()
    for at in range(60):
        place = tmp_path / str(at)
        place.mkdir()
        with refusing(at, errno.ENOSPC) as was_refused:
            try:
                write(place / "new")
            except FileError as error:
                said = str(error)
            else:
                break
        assert was_refused() and said.count(": expected room and permission to write, got No space left") == 1 and "new" in said, said
        left.append({path.name for path in place.rglob("*") if path.is_file()})
    assert 6 <= at < 60
    assert all(files in (set(), {path.name for path in (place / "new").iterdir()}) for files in left)


def test_files_are_on_the_disk_before_they_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stops loses what was not flushed: each file and its folder, and then the rename."""
    done: list[str] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (done.append(name), real(*args))[1]

    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    writing.replace_files(tmp_path, {"a": b"1", "b": b"2"})
    assert done == ["fsync"] * 3 + ["rename", "fsync", "replace", "replace", "fsync"]
    done.clear()
    writing.replace_file(tmp_path / "c", b"3")
    assert done == ["fsync", "replace", "fsync"]


def test_a_program_is_there_though_its_cache_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for at in range(5):
        with refusing(at, errno.ENOSPC) as was_refused:
            binary_cache._write(tmp_path / "cache" / "program.bin", b"binary")
        assert was_refused() and not list(tmp_path.rglob(".*"))
    binary_cache._write(tmp_path / "cache" / "program.bin", b"binary")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["program.bin"]


def limited(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def run(*words: str, before: Callable[[], None] | None = None, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fusible", *words]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, preexec_fn=before, env=os.environ)


def test_a_run_on_a_disk_that_is_full_says_so_and_keeps_what_was_saved(tmp_path: Path) -> None:
    size = "--layers 1 --hidden 16 --heads 2 --seq-len 16 --batch 32 --out".split()
    assert run("train", "--steps", "1", *size, str(tmp_path)).returncode == 0
    before = content(tmp_path)
    ended = run("train", "--resume", str(tmp_path), "--steps", "2", before=limited(20_000))
    do = "make room there, or name another folder"
    assert (ended.returncode, ended.stderr) == (
        2,
        f"model.safetensors in {tmp_path}: expected room and permission to write, got File too large; {do}.\n",
    )
    assert content(tmp_path) == before and len(load_runs(tmp_path)[1]["bf16"].record.loss) == 1


@pytest.mark.parametrize("words", [("info", "--json"), ("info",), ("check-backend", "torch", "--only", "gelu", "--json")], ids="-".join)
def test_output_that_finds_no_room_is_told_of_once(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        ended = run(*words, stdout=full)
    sentence = "the standard output: expected room and permission to write, got No space left on device; name another place.\n"
    assert (ended.returncode, ended.stderr) == (2, sentence)


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("link", "null"):
        writing.replace_file(tmp_path / name, b"new")
        assert (tmp_path / name).is_symlink()
    assert (tmp_path / "file").read_text() == "new" and Path("/dev/null").is_char_device()
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == '["file", "link", "null"]'
