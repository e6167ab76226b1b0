"""Indices that come as data, in the compiled kernels: the cases run in a child, for a kernel that follows a wrong one ends its process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parent / "index_cases.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """The cases in a process of their own, where a test that kills it is named by ``faulthandler``."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", *options]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}  # what is printed is read
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)


def test_every_index_is_checked_before_it_is_followed() -> None:
    finished = run(str(CASES))
    assert finished.returncode == 0, f"ended with {finished.returncode}:\n{finished.stdout[-4000:]}\n{finished.stderr[-4000:]}"
    passed = re.search(r"(\d+) passed", finished.stdout)
    assert passed is not None and int(passed[1]) >= 350, finished.stdout[-500:]


def test_a_case_that_kills_its_process_is_told(tmp_path: Path) -> None:
    case = tmp_path / "killed_case.py"
    case.write_text("import os, signal\n\ndef test_it() -> None:\n    os.kill(os.getpid(), signal.SIGSEGV)\n")
    finished = run(str(case), "--rootdir", str(tmp_path))
    assert finished.returncode < 0 and "killed_case.py" in finished.stderr
