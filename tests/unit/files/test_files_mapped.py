"""Files that are mapped, and folders that are there whole or not at all."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from fusible.errors import CheckpointError, FileError, MissingFileError
from fusible.files import NewFolder, map_file, put

PAGE = mmap.ALLOCATIONGRANULARITY


def test_a_mapped_file_has_the_files_bytes_and_is_not_written_through(tmp_path: Path) -> None:
    content = os.urandom(3 * PAGE + 5)
    (tmp_path / "file").write_bytes(content)
    whole, part = map_file(tmp_path / "file"), map_file(tmp_path / "file", offset=PAGE, length=10, size=len(content))
    assert whole[:] == content and part[:] == content[PAGE : PAGE + 10]
    whole[:4] = b"else"
    assert (tmp_path / "file").read_bytes() == content


def test_what_is_no_file_is_not_mapped(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo")
    for name, got in ((".", "a directory"), ("empty", "0 bytes"), ("fifo", "a FIFO"), ("none", "No such file"), ("a\0b", "null")):
        with pytest.raises(MissingFileError if name == "none" else CheckpointError, match=got):
            map_file(tmp_path / name)
    with pytest.raises(CheckpointError, match="expected 7 bytes, as when it was opened"):
        (tmp_path / "file").write_bytes(b"123")
        map_file(tmp_path / "file", size=7)


def test_a_new_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    with NewFolder(tmp_path / "a" / "b") as folder:
        with folder.file("one") as stream:
            put(stream, memoryview(b"1" * 100_000))
        folder.write("two.part", b"2")
        folder.rename("two.part", "two")
        assert not (tmp_path / "a" / "b").exists()
        with pytest.raises(FileError):  # a name is taken once
            folder.write("one", b"")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a" / "b").iterdir()} == {"one": b"1" * 100_000, "two": b"2"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_a_folder_that_was_made_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="expected a new folder, got a folder with files in it"):
        with NewFolder(tmp_path / "made") as folder:
            folder.write("mine", b"1")
            (tmp_path / "made").mkdir()
            (tmp_path / "made" / "theirs").write_bytes(b"2")
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "theirs"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        with NewFolder(tmp_path / "made") as folder:
            folder.write("mine", b"1")
            1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []
