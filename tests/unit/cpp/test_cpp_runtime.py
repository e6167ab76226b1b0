"""Levels, threads, forks and the absence of the extension."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest
import torch

from fusible import cpp_extensions
from fusible.knobs import FUSIBLE_CPU_LEVEL


def _in_child(pipe: Connection, x: torch.Tensor, codes: torch.Tensor) -> None:
    """Only native calls: torch's own kernels may hang in a forked child."""
    cpp_extensions.quantize(x, codes, 1.0, torch.float8_e4m3fn, num_threads=2)
    pipe.send((cpp_extensions.get_num_threads(), codes.numpy().tobytes()))
    pipe.close()


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_info_tells_what_was_chosen() -> None:
    info = cpp_extensions.info()
    held_to = FUSIBLE_CPU_LEVEL.get()
    assert info["available"] and info["level"] == (held_to if held_to in info["levels_usable"] else info["levels_usable"][-1])
    assert set(info["levels_usable"]) <= set(info["levels_compiled"])
    assert info["threads"] >= 1 and isinstance(info["openmp"], bool) and info["compiler"]


def test_a_level_is_taken_and_given_back(level: str) -> None:
    assert cpp_extensions.get_level() == level
    cpp_extensions.set_level("")
    assert cpp_extensions.get_level() == cpp_extensions.usable_levels()[-1]


@pytest.mark.skipif(not cpp_extensions.available or not cpp_extensions.has_openmp(), reason="built without OpenMP")
def test_threads_follow_torch_unless_they_are_set() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert cpp_extensions.get_num_threads() == 3
        cpp_extensions.set_num_threads(5)
        assert cpp_extensions.get_num_threads() == 5
    finally:
        cpp_extensions.set_num_threads(0)
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_runs_on_one_thread_and_does_not_hang() -> None:
    x = torch.linspace(-500, 500, 400_000)
    codes, blank = torch.empty(2, 400_000, dtype=torch.uint8)
    cpp_extensions.quantize(x, codes, 1.0, torch.float8_e4m3fn, num_threads=2)  # starts the threads that a child does not inherit
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(sender, x, blank))
    child.start()
    try:
        assert receiver.poll(20), "the child hangs"
        assert receiver.recv() == (1, codes.numpy().tobytes())
    finally:
        child.kill()
        child.join()


def test_the_knobs_choose_level_and_threads() -> None:
    code = "from fusible import cpp_extensions as c; print(c.get_level(), c.get_num_threads())"
    finished = _run(code, FUSIBLE_CPU_LEVEL="generic", FUSIBLE_NUM_THREADS="1")
    assert finished.stdout.split() == ["generic", "1"], finished.stderr


def test_importing_the_package_loads_neither_torch_nor_the_extension() -> None:
    code = "import sys, fusible.cpp_extensions; print('torch' in sys.modules, 'fusible.cpp_extensions._native' in sys.modules)"
    assert _run(code).stdout.split() == ["False", "False"]


def test_an_absent_extension_is_reported_and_named_by_its_functions() -> None:
    code = """
import sys
sys.modules["fusible.cpp_extensions._native"] = None
from fusible import cpp_extensions as c
from fusible.errors import BackendError
print(c.available, "without a working C++ compiler" in c.reason, c.info()["available"])
try:
    c.quantize
except BackendError as error:
    print(error)
print(hasattr(c, "unknown"))
"""
    lines = _run(code).stdout.splitlines()
    assert lines[0] == "False True False" and lines[2] == "False"
    assert lines[1].startswith("fusible.cpp_extensions.quantize: expected the compiled extension, got an installation that was made without")
