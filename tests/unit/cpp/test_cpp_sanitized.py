"""The native code under the address and undefined-behaviour sanitizers: the kernels in a program of their own, at every level, and the whole
extension under the sweeps of generated calls from Python."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpp_sources import FAMILIES, FLAGS, ROOT, SOURCES, host_sources, levels_of

COMPILER = shutil.which("g++")
SANITIZE = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-ffp-contract=off"]
PRELOADED = ["libasan.so", "libstdc++.so"]
"""What stands before Python's own libraries; the second so that exceptions are seen from the first one on."""
SWEEPS = ["test_bad_calls", "test_bad_nvte_calls", "test_generated_nvte_calls", "test_bad_module_calls"]
DRIVERS = sorted(Path(__file__).parent.glob("sanitized_*.cpp"))


def test_every_family_has_a_driver() -> None:
    assert {f"sanitized_{family}" for family in FAMILIES} | {"sanitized_main"} == {path.stem for path in DRIVERS}


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="no compiler")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the levels are those of x86")
def test_no_kernel_reads_or_writes_out_of_bounds(tmp_path: Path) -> None:
    assert COMPILER
    base = [COMPILER, *SANITIZE, "-DFUSIBLE_X86_KERNELS=1", f"-I{SOURCES}", f"-I{SOURCES / 'include'}", f"-I{Path(__file__).parent}"]
    units = {tmp_path / f"{path.parent.name}_{path.stem}.o": [str(path)] for path in [*host_sources(), *DRIVERS]}
    for family, source in FAMILIES.items():
        for level in levels_of(family):
            units[tmp_path / f"{family}_{level}.o"] = [f"-DFUSIBLE_LEVEL={level}", *FLAGS[level], str(source)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda unit: subprocess.run([*base, *unit[1], "-c", "-o", str(unit[0])], check=True), units.items()):
            pass
    program = tmp_path / "driver"
    subprocess.run([*base, *map(str, units), "-lpthread", "-o", str(program)], check=True)
    environment = {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"}
    environment.pop("LD_PRELOAD", None)
    finished = subprocess.run([str(program)], capture_output=True, text=True, check=False, env=environment)
    assert finished.returncode == 0 and finished.stdout == "done\n", finished.stderr


@pytest.fixture
def sanitized_extension(tmp_path: Path) -> Path:
    """The whole extension, bindings and all, under both sanitizers."""
    build = tmp_path / "build"
    pybind11 = subprocess.run([sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True).stdout.strip()
    settings = {"CMAKE_BUILD_TYPE": "None", "CMAKE_CXX_FLAGS": "-O1", "FUSIBLE_SANITIZE": "ON", "FUSIBLE_WARNINGS_AS_ERRORS": "OFF"}
    settings |= {"Python_EXECUTABLE": sys.executable, "pybind11_DIR": pybind11}
    cmake = Path(sys.executable).with_name("cmake")
    definitions = [f"-D{name}={value}" for name, value in settings.items()]
    for command in (["-S", ROOT, "-B", build, *definitions], ["--build", build, "--parallel", str(os.cpu_count())]):
        subprocess.run([cmake, *command], check=True, stdout=subprocess.DEVNULL)
    (extension,) = build.glob("_native*.so")
    return extension


def _library(name: str) -> str:
    assert COMPILER
    return subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


def _run(extension: Path, *arguments: str) -> str:
    """What a Python process prints that calls the sanitized kernels, where each allocation, Python's own too, is one that the sanitizer sees."""
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(map(_library, PRELOADED)),
        "PYTHONMALLOC": "malloc",
        "PYTEST_ADDOPTS": "",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",  # Python leaves its modules' memory to the end of the process
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    program = str(Path(__file__).with_name("sanitized_python.py"))
    finished = subprocess.run(
        [sys.executable, program, str(extension), *arguments], cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert finished.returncode == 0, f"{finished.stdout[-4000:]}\n{finished.stderr[-8000:]}"
    return finished.stdout


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="no compiler")
def test_no_generated_call_reads_or_writes_out_of_bounds(sanitized_extension: Path) -> None:
    """The sweeps' calls of the native functions, tex, nvte, modules and operations, right ones and bad ones, with their own assertions."""
    printed = _run(sanitized_extension, str(Path(__file__).with_name("generated_calls.py")), "3000000", "10000")
    assert sum(int(number) for number in re.findall(r"^\w+ (\d+)$", printed, flags=re.MULTILINE)) == 10_000
    printed = _run(sanitized_extension, "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *(f"tests/sweeps/{name}.py" for name in SWEEPS))
    assert " passed" in printed and "failed" not in printed
