"""The kernels under the address and undefined-behaviour sanitizers, as a program of its own (Python's allocator would hide an overrun)."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpp_sources import FAMILIES, FLAGS, SOURCES, host_sources, levels_of

COMPILER = shutil.which("g++")
SANITIZE = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-ffp-contract=off"]
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
