"""The kernels under the address and undefined-behaviour sanitizers, as a program of its own (Python's allocator would hide an overrun)."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from test_cpp_levels_apart import FLAGS, ROOT

COMPILER = shutil.which("g++")
SANITIZE = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-ffp-contract=off"]
COMMON = ["cast/plain.cpp", "cast/quantize.cpp", "cast/select.cpp", "runtime/level.cpp", "runtime/threads.cpp"]


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="no compiler")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the levels are those of x86")
def test_no_kernel_reads_or_writes_out_of_bounds(tmp_path: Path) -> None:
    assert COMPILER
    sources = ROOT / "cppsrc"
    base = [COMPILER, *SANITIZE, "-DFUSIBLE_X86_KERNELS=1", f"-I{sources}", f"-I{sources / 'include'}"]
    for level, flags in FLAGS.items():
        kernel = [f"-DFUSIBLE_LEVEL={level}", *flags, "-c", str(sources / "cast/kernels.cpp"), "-o", str(tmp_path / f"{level}.o")]
        subprocess.run([*base, *kernel], check=True)
    program = tmp_path / "driver"
    objects = [str(tmp_path / f"{level}.o") for level in FLAGS]
    common = [str(sources / name) for name in COMMON]
    subprocess.run([*base, str(Path(__file__).with_name("sanitized_driver.cpp")), *common, *objects, "-lpthread", "-o", str(program)], check=True)
    environment = {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"}
    environment.pop("LD_PRELOAD", None)
    finished = subprocess.run([str(program)], capture_output=True, text=True, check=False, env=environment)
    assert finished.returncode == 0 and finished.stdout == "done\n", finished.stderr
