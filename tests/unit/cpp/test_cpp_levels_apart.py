"""Kernels compiled for different instruction sets share no symbol, so a linker cannot mix them; checked on the objects themselves."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from cpp_sources import FAMILIES, FLAGS, SOURCES, levels_of

COMPILER, NM = shutil.which("g++"), shutil.which("nm")


@pytest.mark.skipif(not COMPILER or not NM, reason="no compiler")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="one level")
@pytest.mark.parametrize(("family", "level"), [(family, level) for family in FAMILIES for level in levels_of(family)])
def test_a_kernel_object_defines_its_table_and_nothing_else(family: str, level: str, tmp_path: Path) -> None:
    assert COMPILER and NM
    built = tmp_path / "kernels.o"
    include = [f"-I{SOURCES}", f"-I{SOURCES / 'include'}"]
    # Without optimization nothing is inlined, so that every function that could be shared shows.
    base = [COMPILER, "-std=c++17", "-O0", *include, f"-DFUSIBLE_LEVEL={level}", *FLAGS[level]]
    subprocess.run([*base, "-c", FAMILIES[family], "-o", built], check=True)
    lines = subprocess.run([NM, "-C", "--defined-only", built], capture_output=True, text=True, check=True).stdout.splitlines()
    shared = [line.split(maxsplit=2)[1:] for line in lines if line.split(maxsplit=2)[1].isupper() or line.split(maxsplit=2)[1] in "wvu"]
    table = f"fusible::{family}::{level}::kernels"
    assert [table] == [name for _, name in shared if name == table]
    assert all(kind in "RD" and name.partition("_of_")[0] == table for kind, name in shared), shared
