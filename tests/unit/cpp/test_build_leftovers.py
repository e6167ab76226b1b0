"""What ``cpp_extensions.build`` leaves in the folder for temporary files: nothing, however a process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("pybind11")
cpp_extensions = pytest.importorskip("fusible.cpp_extensions", exc_type=ImportError)

from fusible.errors import CompileError  # noqa: E402

SOURCE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit_tiny() { return PyModule_Create(&definition); }
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.cpp"
    path.write_text(SOURCE)
    return path


def test_a_library_that_is_loaded_leaves_no_file(temporary: Path, source: Path) -> None:
    assert cpp_extensions.build("tiny", [source]).__name__ == "tiny"
    source.write_text("not C++")
    with pytest.raises(CompileError):
        cpp_extensions.build("tiny", [source])
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_build(temporary: Path, source: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "slow"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    program = f"from fusible import cpp_extensions; cpp_extensions.build('tiny', [{str(source)!r}], compiler={str(compiler)!r})"
    with subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(temporary)}, start_new_session=True) as process:
        # What else stands there for a moment is tempfile's own, which tries by a file whether the folder can be written to.
        while not list(temporary.glob("fusible_*")) and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    mine = temporary / f"fusible_{os.getpid()}_x"
    mine.mkdir()
    assert len(list(temporary.iterdir())) == 2
    cpp_extensions.build("tiny", [source])
    assert list(temporary.iterdir()) == [mine]
