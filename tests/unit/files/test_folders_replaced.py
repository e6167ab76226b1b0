"""``replace_folder``, and files of a ``Replacement`` that are written piece by piece."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusible.errors import FileError
from fusible.files import Replacement, held, put, replace_folder


def made(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "file").write_text(content)
    return folder


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    place = tmp_path / "place"
    replace_folder(place, made(tmp_path / "new", "one"))
    made(tmp_path / ".place.old", "left by a process that was killed")
    replace_folder(place, made(tmp_path / "new", "two"))
    assert (place / "file").read_text() == "two" and os.listdir(tmp_path) == ["place"]
    with pytest.raises(FileError, match="place in "):
        replace_folder(place, tmp_path / "nothing")
    assert (place / "file").read_text() == "two" and os.listdir(tmp_path) == ["place"]


def test_files_of_a_replacement_are_valid_together(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    replacement = Replacement(tmp_path, "a")
    with replacement.file("a") as stream:
        put(stream, b"ne")
        put(stream, b"w")
    assert (tmp_path / "a").read_text() == "old"
    with pytest.raises(FileError), replacement.file("a"):  # once is enough
        pass
    replacement.complete({"b": b"too"})
    assert (tmp_path / "a").read_text() == "new" and (tmp_path / "b").read_text() == "too"


def test_a_folder_is_held_by_one_until_it_ends(tmp_path: Path) -> None:
    with held(tmp_path) as first, held(tmp_path) as second:
        assert first and not second
    program = f"""
from pathlib import Path
from fusible.files import held
with held(Path({str(tmp_path)!r})) as alone:
    print(alone, flush=True)
    input()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"True\n"
        with held(tmp_path) as alone:
            assert not alone
        process.kill()
        process.wait()
    with held(tmp_path) as alone:
        assert alone
    with held(tmp_path / "none") as alone:  # what cannot be locked is nobody's
        assert alone
    assert not any(tmp_path.iterdir())
