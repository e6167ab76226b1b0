"""``make setup`` and the compiler: one that failed is tried again, another one builds anew, and the reason is kept.

Python and pip are stood in for by a script that notes what it is asked for; it "builds" the extension where ``CXX`` is no broken compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusible.cpp_extensions.attempt import failure

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$*" in
  *fusible.cpp_extensions.attempt*) if [ -e built ]; then exit 0; fi; [ -z "$(head -n 1 .venv/.compiler)" ] ;;
  *"-e .[dev]"*) echo built >> calls; rm -f built; case "$CXX" in ""|*false|*missing) ;; *) touch built ;; esac ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    for name in ("Makefile", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "cppsrc").mkdir()
    (tmp_path / "build" / "wheel").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    for name, version in (("good", "good 1"), ("other", "other 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def setup(folder: Path, compiler: str | None) -> int:
    """Run ``make setup`` with a compiler (None: none at all), and return how often it has built since the folder was made."""
    names = ("sh", "test", "touch", "rm", "mv", "cmp", "head", "find", "true", "python3")
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in names:
        if not (tools / name).exists():
            (tools / name).symlink_to(shutil.which(name) or sys.executable)
    environment = {"PATH": str(tools), "HOME": str(folder), **({} if compiler is None else {"CXX": compiler})}
    ended = subprocess.run([str(shutil.which("make")), "setup"], cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return len((folder / "calls").read_text().splitlines())


def test_a_compiler_that_failed_is_tried_again_and_a_good_one_is_final(folder: Path) -> None:
    cached = folder / "build" / "wheel" / "configured_with"
    assert [setup(folder, "/bin/false") for _ in range(2)] == [1, 2] and not (folder / ".venv" / ".installed").exists()
    cached.write_text("CXX=/bin/false")
    good = str(folder / "good")
    assert [setup(folder, good) for _ in range(3)] == [3, 3, 3] and (folder / "built").exists() and not cached.exists()
    assert [setup(folder, str(folder / "other")) for _ in range(2)] == [4, 4]
    (folder / "other").write_text("#!/bin/sh\necho other 2\n")
    assert [setup(folder, str(folder / "other")) for _ in range(2)] == [5, 5]
    assert setup(folder, "/bin/false") == 6 and not (folder / ".venv" / ".installed").exists()


def test_where_there_is_no_compiler_the_setup_is_final_until_there_is_one(folder: Path) -> None:
    assert [setup(folder, None) for _ in range(2)] == [1, 1]
    os.symlink(folder / "good", folder / "tools" / "g++")
    assert setup(folder, None) == 2


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("2026-01-01T10:00:00,1   CMake Error at x.cmake:71:\n is not able to compile a simple test program.", "is not able to"),
        ("ok\n2026-01-01T10:00:00,1 cppsrc/a.cpp:3:1: error: no such thing\nFAILED: b", "cppsrc/a.cpp:3:1: error: no such thing"),
        ("nothing", "see the output of pip install -v ."),
    ],
)
def test_what_failed_is_found_in_the_log(log: str, said: str) -> None:
    assert failure(log.splitlines()).startswith(said)


def test_a_native_build_that_failed_is_told_of(tmp_path: Path) -> None:
    """In an environment of its own, by its prefix."""
    (tmp_path / "compiler").write_text("/bin/false\n")
    (tmp_path / "log").write_text("x.cpp:1:1: error: broken\n")
    program = (
        "import sys, importlib.util as u; sys.prefix = sys.argv[1]; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name.endswith('_native') else find(name, *rest)\n"
        "from fusible.cpp_extensions.attempt import attempt, why_not\n"
        "print(attempt(*sys.argv[2:]), why_not())"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(tmp_path / "compiler"), str(tmp_path / "log")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == ["native kernels: none (/bin/false failed: x.cpp:1:1: error: broken)", "1  (/bin/false failed: x.cpp:1:1: error: broken)"]
