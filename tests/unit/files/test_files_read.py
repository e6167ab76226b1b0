"""What is loaded is a regular file of a size that fits, and JSON of one meaning: every reader, on everything else that may lie in a file's place."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fusible import lazy
from fusible.cli.run_files import CHECKPOINT_FILES
from fusible.cli.training.checkpoint import save_checkpoint
from fusible.cli.training.layout import load_runs
from fusible.cli.training.options import TrainOptions
from fusible.cli.training.text import read_text
from fusible.cli.training.trainer import Trainer
from fusible.errors import ArgumentError, CheckpointError, FusibleError
from fusible.files import parse_json, read_file

OPTIONS = TrainOptions(recipes=("bf16",), steps=4, layers=1, hidden=8, heads=2, seq_len=8, batch=2)
NAMES = [*CHECKPOINT_FILES, "program", "text"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, an executable and a text."""
    folder = tmp_path_factory.mktemp("saved")
    save_checkpoint(folder, Trainer(OPTIONS, "bf16", read_text(None, OPTIONS.seq_len)).checkpoint())
    lazy.compile(lambda x: x * lazy.Tensor(np.arange(3, dtype=np.float32)), args=[lazy.InputInfo((3,), lazy.float32)]).save(folder / "program")
    (folder / "text").write_bytes(b"ab" * 500)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def load(path: Path) -> object:
    """Read a file as the package does."""
    if path.name == "program":
        return lazy.Executable.load(path)
    return read_text(str(path), 8) if path.name == "text" else load_runs(path.parent)


def make_socket(path: Path) -> None:
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def make_sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(2**42)


INSTEAD: dict[str, Callable[[Path], None]] = {
    "FIFO": lambda path: os.mkfifo(path),
    "directory": lambda path: path.mkdir(),
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "socket": make_socket,
    "nothing": lambda path: None,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "4 TiB": make_sparse,
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("kind", INSTEAD)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_refused_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    monkeypatch.chdir(folder)
    load(folder / name)
    (folder / name).unlink()
    INSTEAD[kind](folder / name)
    before = sorted(folder.iterdir())
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **named: pytest.fail("opened") if not Path(path).is_file() else opened(path, *rest, **named))
    with pytest.raises(ArgumentError if name == "text" else CheckpointError, match=rf"(?m)^.*{name}.*: expected .*, got .*; .*\.$") as error:
        load(folder / name)
    assert ("\n" not in str(error.value) or name == "program") and sorted(folder.iterdir()) == before  # an executable's shows the user's line first


BAD_JSON = {
    "brackets": b"[" * 200_000,
    "closed brackets": b"[" * 200_000 + b"]" * 200_000,
    "objects": b'{"a":' * 200_000,
    "just too deep": b"[" * 201 + b"]" * 201,
    "NaN": b'{"a": NaN}',
    "infinity": b'{"a": [-Infinity]}',
    "huge float": b'{"a": 1e999}',
    "65 bits": b"[18446744073709551616]",
    "long integer": b"[" + b"9" * 100_000 + b"]",
    "twice": b'{"a": 1, "b": {"c": 1, "c": 1}}',
    "UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "empty": b"",
    "two": b"{} {}",
    "cut": b'{"a": 1',
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_of_more_than_one_meaning_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"^some file: expected JSON, got [^\n]*; use an intact checkpoint\.$"):
        parse_json(BAD_JSON[name], of="some file")
    (folder / "state.json").write_bytes(BAD_JSON[name])
    with pytest.raises(CheckpointError, match="state.json: expected JSON, got"):
        load(folder / "state.json")


def test_json_of_one_meaning_is_read() -> None:
    deep = b"[" * 200 + b"]" * 200
    read = parse_json(b'{"a": [1, -9223372036854775808, 18446744073709551615, 1.5, true, null, "\\u00e9"]}', of="x")
    assert read == {"a": [1, -(2**63), 2**64 - 1, 1.5, True, None, "\u00e9"]}
    assert parse_json(deep, of="x") is not None


def test_a_manifest_is_as_long_as_its_losses_may_be(folder: Path) -> None:
    """Nothing is read of a longer one, so the limit costs no memory."""
    with open(folder / "state.json", "ab") as file:
        file.truncate(2**20 + 32 * 2**21 + 1)
    with pytest.raises(CheckpointError, match=r".*state.json: expected at most 68157440 bytes, got 68157441"):
        load(folder / "state.json")


def test_tensors_are_as_large_as_the_options_need(folder: Path) -> None:
    with open(folder / "model.safetensors", "ab") as file:
        file.truncate(2**23)
    with pytest.raises(CheckpointError, match=r".*model.safetensors: expected at most \d+ bytes, got 8388608"):
        load(folder / "model.safetensors")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    for change in (b"0123", b"0123456789abcdef"):
        with monkeypatch.context() as patched:
            patched.setattr("fusible.files.reading._check_size", lambda *_, change=change: path.write_bytes(change))
            with pytest.raises(CheckpointError, match="a file that changes while it is read"):
                read_file(path)
        path.write_bytes(b"0123456789")
    assert read_file(path, limit=10) == b"0123456789"


def archive(compression: int, **parts: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as file:
        for name, content in parts.items():
            file.writestr(name.replace("_", "."), content)
    return made.getvalue()


@pytest.mark.parametrize(
    ("body", "got"),
    [
        (archive(zipfile.ZIP_DEFLATED, executable_json=bytes(2**25)), "compressed"),
        (archive(zipfile.ZIP_BZIP2, executable_json=bytes(2**25)), "compressed"),
        (archive(zipfile.ZIP_STORED, executable_json=b"{}", other=b""), "members"),
    ],
    ids=["deflate", "bzip2", "another"],
)
def test_an_archive_that_grows_when_it_is_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, body: bytes, got: str) -> None:
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("it was read"))
    (folder / "program").write_bytes(b"fusible executable 1\n" + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    with pytest.raises(CheckpointError, match=f"program: expected .*, got damaged contents .*{got}"):
        load(folder / "program")


def test_every_error_is_of_this_package(folder: Path) -> None:
    for name in ("a\0b", ""):
        with pytest.raises(FusibleError, match=": expected "):
            read_file(folder / name if name == "" else name)
