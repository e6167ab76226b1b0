"""Replacing files: all or none, whatever happens in between."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from counted_kills import COUNTED

from fusible.files import locate, replace_file, replace_files
from fusible.files import writing as files

OLD = {"a": b"old a", "b": b"old b", "c": b"old c"}
NEW = {"a": b"new a", "b": b"new b", "c": b"new c"}

_KILLED = (
    COUNTED
    + """
from concurrent.futures import ThreadPoolExecutor
from fusible.files import writing as files
left = int(sys.argv[2])
for name in ("rename", "replace", "fsync"):
    setattr(os, name, counted(getattr(os, name)))
Path.mkdir, Path.rmdir = counted(Path.mkdir), counted(Path.rmdir)
files.replace_files(Path(sys.argv[1]), {name: f"new {name}".encode() for name in "abc"})
"""
)


def read(folder: Path) -> dict[str, bytes]:
    return {name: locate(folder, name).read_bytes() for name in OLD}


def test_files_are_replaced_and_nothing_else_is_left(tmp_path) -> None:
    replace_files(tmp_path / "run", OLD)
    replace_files(tmp_path / "run", NEW)
    assert read(tmp_path / "run") == NEW
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize("place", range(3))
def test_a_writer_that_raises_changes_nothing(tmp_path, monkeypatch, place: int) -> None:
    replace_files(tmp_path, OLD)
    write, written = files._write, []

    def failing(path: Path, content: bytes) -> None:
        if len(written) == place:
            path.write_bytes(content[:2])
            raise OSError(28, "No space left on device")
        written.append(path)
        write(path, content)

    monkeypatch.setattr(files, "_write", failing)
    with pytest.raises(OSError, match="No space"):
        replace_files(tmp_path, NEW)
    assert read(tmp_path) == OLD
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_a_process_killed_at_any_moment_leaves_all_old_or_all_new_files(tmp_path) -> None:
    seen = []
    for moment in range(40):
        folder = tmp_path / str(moment)
        replace_files(folder, OLD)
        ended = subprocess.run([sys.executable, "-c", _KILLED, str(folder), str(moment)], env=os.environ).returncode
        found = read(folder)
        assert found in (OLD, NEW), moment
        seen.append(found == NEW)
        replace_files(folder, {"a": b"next"})
        assert read(folder) == {**found, "a": b"next"}
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert seen == sorted(seen) and not seen[0] and seen[-1]
    assert sum(seen) > 3


def test_what_a_killed_process_left_beside_a_file_is_swept_by_the_next_save(tmp_path) -> None:
    path = tmp_path / "run[1].bin"
    code = (
        "import os, pathlib, sys\n"
        "import fusible.files.writing as writing\n"
        "writing.os.replace = lambda *_: os.kill(os.getpid(), 9)\n"
        "writing.replace_file(pathlib.Path(sys.argv[1]), b'half')\n"
    )
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    (tmp_path / ".other.bin.1.saving").write_bytes(b"of another name")
    left = [name for name in os.listdir(tmp_path) if name.startswith(".run")]
    assert len(left) == 1 and not path.exists()  # the second swept what the first left, and left its own
    replace_file(path, b"whole")
    assert sorted(os.listdir(tmp_path)) == [".other.bin.1.saving", "run[1].bin"] and path.read_bytes() == b"whole"


def test_what_another_process_writes_beside_a_file_is_not_swept(tmp_path) -> None:
    path = tmp_path / "run.bin"
    held = tmp_path / ".run.bin.1.saving"
    with open(held, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        replace_file(path, b"ours")
        assert held.exists()
    replace_file(path, b"again")
    assert not held.exists()


def test_threads_that_save_one_file_at_once_leave_one_whole_content(tmp_path) -> None:
    path = tmp_path / "run.bin"
    contents = [bytes([i]) * 4096 for i in range(4)]

    def save(i: int) -> None:
        for _ in range(20):
            replace_file(path, contents[i])
            assert path.read_bytes() in contents

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(4)))
    assert os.listdir(tmp_path) == ["run.bin"]
