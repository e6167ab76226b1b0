"""What the machine tells; and that all of the package does without what POSIX alone has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusible import ending
from fusible.machine import available_memory, cpu_model, installed_memory, peak_memory, resident_memory, thread_names

WITHOUT_POSIX = """
import importlib, os, pkgutil, sys
from pathlib import Path
import jaxlib, numpy, rich, safetensors, torch  # what others need of POSIX, they import where it is

for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("O_CLOEXEC", "O_NONBLOCK", "fork", "getloadavg", "register_at_fork", "sysconf", "sysconf_names"):
    delattr(os, name)
import fusible
import fusible.machine

for name in ("_CPUINFO", "_MEMINFO", "_STATM"):
    setattr(fusible.machine, name, Path("/no/proc"))
fusible.machine._GROUPS = ()
assert fusible.machine.available_memory() == sys.maxsize and fusible.machine.installed_memory() == fusible.machine.peak_memory() == 0
for found in pkgutil.walk_packages(fusible.__path__, "fusible."):
    if found.name.split(".")[-1] not in ("__main__", "attempt"):
        try:
            importlib.import_module(found.name)
        except ImportError as error:  # of a package that is not there
            assert error.name is not None and not error.name.startswith("fusible"), (found.name, error)
            assert error.name not in ("fcntl", "grp", "pwd", "resource", "termios"), (found.name, error)

from fusible.cli.main import main

assert main(["info", "--json"]) == 0
sizes = ["--steps", "2", "--layers", "1", "--hidden", "32", "--heads", "2", "--seq-len", "32", "--batch", "2"]
assert main(["train", "--recipe", "current", *sizes, "--out", sys.argv[1]]) == 0
assert main(["train", "--resume", sys.argv[1], "--steps", "3"]) == 0
"""


def test_what_the_machine_tells_is_so() -> None:
    assert installed_memory() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**20 < available_memory() <= installed_memory() + 2**44
    assert 2**20 < resident_memory() <= peak_memory() + 2**24
    assert cpu_model()


def test_all_of_it_works_without_what_posix_alone_has(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_POSIX, str(tmp_path / "run")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]


def test_threads_have_the_names_that_the_system_has(monkeypatch: pytest.MonkeyPatch) -> None:
    names = thread_names()
    assert names is None or "python" in " ".join(names) or "pytest" in " ".join(names)
    monkeypatch.setattr("fusible.machine._TASKS", Path("/nowhere"))
    assert thread_names() is None


@pytest.mark.parametrize(("names", "waits"), [(["python3"], False), (["python3", "pt_gloo_runloop"], True), (None, True)])
def test_threads_of_gloo_get_their_turn_before_python_ends(names: list[str] | None, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(ending, "thread_names", lambda: done.append("asked") or names)
    monkeypatch.setattr(ending.gc, "collect", lambda: done.append("collected"))
    monkeypatch.setattr(ending.time, "sleep", lambda seconds: done.append("waited"))
    ending.let_threads_end()
    assert done == ["collected", "asked", *(["waited"] if waits else [])]


def test_who_lays_models_out_ends_in_order() -> None:
    """Registered before all else, so that it comes after all else."""
    lines = (
        "import atexit",
        "found = []",
        "atexit.register = lambda f, *a: found.append(f) or f",
        "import fusible.distributed",
        "from fusible import ending",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join([*lines, "print(found.count(ending.let_threads_end))"])], capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr
