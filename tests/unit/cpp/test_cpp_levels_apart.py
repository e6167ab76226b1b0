"""Kernels compiled for different instruction sets share no symbol, so a linker cannot mix them; checked on the objects themselves."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FLAGS = {
    "generic": ["-DFUSIBLE_SIMD_GENERIC=1"],
    "avx2": ["-DFUSIBLE_SIMD_AVX2=1", "-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-DFUSIBLE_SIMD_AVX512=1", "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"],
}
COMPILER, NM = shutil.which("g++"), shutil.which("nm")


@pytest.mark.skipif(not COMPILER or not NM, reason="no compiler")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="one level")
@pytest.mark.parametrize("level", FLAGS)
def test_a_kernel_object_defines_its_table_and_nothing_else(level: str, tmp_path: Path) -> None:
    assert COMPILER and NM
    built = tmp_path / "kernels.o"
    include = [f"-I{ROOT / 'cppsrc'}", f"-I{ROOT / 'cppsrc/include'}"]
    source = ROOT / "cppsrc/cast/kernels.cpp"
    # Without optimization nothing is inlined, so that every function that could be shared shows.
    subprocess.run([COMPILER, "-std=c++17", "-O0", *include, f"-DFUSIBLE_LEVEL={level}", *FLAGS[level], "-c", source, "-o", built], check=True)
    lines = subprocess.run([NM, "-C", "--defined-only", built], capture_output=True, text=True, check=True).stdout.splitlines()
    shared = [line.split(maxsplit=2)[1:] for line in lines if line.split(maxsplit=2)[1].isupper() or line.split(maxsplit=2)[1] in "wvu"]
    assert shared == [["R", f"fusible::{level}::cast_kernels"]] or shared == [["D", f"fusible::{level}::cast_kernels"]]
