"""What commands leave in the folder for temporary files: nothing, killed or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = "--layers 1 --hidden 8 --heads 1 --seq-len 8 --batch 1 --text text.txt"
COMMANDS = (
    "info", f"train {SMALL} --steps 2 --out trained", "generate --bytes 2 trained",
    "run script.py", "check-backend --only gelu torch", "trace script.py", "train --steps 0x", "no-command",
)  # fmt: skip
PROGRAM = """
import contextlib, sys
from fusible.cli import main
for line in sys.argv[1:]:
    with contextlib.suppress(SystemExit):
        main(line.split())
"""


@pytest.fixture
def run(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / name for name in ("temporary", "work", "cache")]
    for folder in folders:
        folder.mkdir()
    (folders[1] / "text.txt").write_text("a text of some length. " * 200)
    (folders[1] / "script.py").write_text("pass\n")
    return folders


def _start(run: list[Path], *lines: str) -> subprocess.Popen[str]:
    temporary, work, cache = run
    # torch's compiler keeps what it made where it is told, by default in a folder for all processes beside temporary files.
    env = {**os.environ, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *lines], env=env, cwd=work, **pipes)  # type: ignore[call-overload, no-any-return]


def test_commands_leave_no_temporary_files(run: list[Path]) -> None:
    said, _ = _start(run, *COMMANDS).communicate()
    assert (run[1] / "trained").is_dir(), said
    assert sorted(run[0].rglob("*")) == []


@pytest.mark.slow
def test_a_training_that_is_killed_leaves_no_temporary_files(run: list[Path]) -> None:
    with _start(run, f"train {SMALL} --steps 100000 --save-every 2 --out trained") as process:
        while not (run[1] / "trained").is_dir() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        said = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, said
    assert sorted(run[0].rglob("*")) == []
