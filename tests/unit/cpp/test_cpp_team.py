"""The threads that compute a compiled program's calls."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cpp_sources import SOURCES

from fusible import cpp_extensions, lazy, tex

_COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    if cpp_extensions.available:
        cpp_extensions.set_num_threads(0)


@pytest.mark.skipif(not _COMPILER, reason="no compiler")
@pytest.mark.parametrize("flags", [["-fsanitize=thread", "-g"], ["-fopenmp"]], ids=["thread sanitizer", "openmp"])
def test_threads_take_turns_and_help_one_another(tmp_path: Path, flags: list[str]) -> None:
    assert _COMPILER
    source, threads, program = Path(__file__).with_name("team_threads.cpp"), SOURCES / "runtime" / "threads.cpp", tmp_path / "team"
    command = [
        _COMPILER,
        "-std=c++17",
        "-O1",
        *flags,
        f"-I{SOURCES}",
        f"-I{SOURCES / 'include'}",
        str(source),
        str(threads),
        "-lpthread",
        "-o",
        str(program),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode and any(missing in built.stderr for missing in ("cannot find", "omp.h")):
        pytest.skip("the compiler lacks that runtime")
    assert built.returncode == 0, built.stderr
    finished = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=120)
    assert finished.returncode == 0 and finished.stdout == "done\n", finished.stderr


@pytest.mark.skipif(not cpp_extensions.available, reason="without the compiled kernels")
def test_what_runs_with_a_team_gives_what_it_gives() -> None:
    result = object()
    assert cpp_extensions.run_with_team(lambda: cpp_extensions.run_with_team(lambda: result)) is result
    with pytest.raises(KeyError, match="a reason"):
        cpp_extensions.run_with_team(lambda: {}["a reason"])
    with pytest.raises(TypeError):
        cpp_extensions.run_with_team(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(not cpp_extensions.available, reason="without the compiled kernels")
def test_a_program_has_the_same_bits_by_any_number_of_threads_and_of_callers() -> None:
    """Two branches, whose calls XLA's threads make at once."""

    def branches(x: lazy.Tensor, y: lazy.Tensor) -> tuple[lazy.Tensor, ...]:
        return tuple(tex.gelu(tex.rmsnorm_fwd(each, x[0], 1e-5, None, None, tex.DType.kFloat32, 0, False)[0], None) for each in (x, y))

    program = lazy.compile(branches, args=[lazy.InputInfo((512, 256), lazy.float32)] * 2)
    assert "fusible::native" in str(program.flat_ir)
    x, y = np.random.default_rng(0).standard_normal((2, 512, 256)).astype(np.float32)
    cpp_extensions.set_num_threads(1)
    alone = [result.numpy().tobytes() for result in program(x, y)]
    wrong: list[int] = []

    def call(caller: int) -> None:
        for _ in range(20):
            if [result.numpy().tobytes() for result in program(x, y)] != alone:
                wrong.append(caller)

    for count in (2, 5):
        cpp_extensions.set_num_threads(count)
        callers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not wrong
