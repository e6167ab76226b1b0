"""The one-definition rule: the whole extension, every level and the bindings, linked with the linker's comparison of types of one name."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpp_sources import FAMILIES, FLAGS, SOURCES, host_sources, levels_of

COMPILER = shutil.which("g++")
BASE = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-flto=auto", "-DFUSIBLE_X86_KERNELS=1"]
COMPARE = ["-Wodr", "-Wlto-type-mismatch", "-Werror=odr", "-Werror=lto-type-mismatch"]

pytestmark = [
    pytest.mark.skipif(not COMPILER, reason="no compiler"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the levels are those of x86"),
]


def link(units: dict[str, list[str]], folder: Path) -> subprocess.CompletedProcess[str]:
    """Compiles each unit by its arguments, and links them all into one library."""
    assert COMPILER
    base = [COMPILER, *BASE, f"-I{SOURCES}", f"-I{SOURCES / 'include'}"]
    objects = [str(folder / f"{name}.o") for name in units]
    commands = [[*base, *arguments, "-c", "-o", built] for built, arguments in zip(objects, units.values(), strict=True)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    return subprocess.run([*base, *COMPARE, "-shared", *objects, "-o", str(folder / "linked.so")], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_nothing_is_defined_twice(tmp_path: Path) -> None:
    pybind11 = subprocess.run([sys.executable, "-m", "pybind11", "--includes"], capture_output=True, text=True, check=True).stdout.split()
    bindings = tmp_path / "bindings.cpp"
    bindings.write_text("".join(f'#include "{path}"\n' for path in sorted((SOURCES / "bindings").glob("*.cpp"))))
    units = {f"{path.parent.name}_{path.stem}": [str(path)] for path in host_sources()}
    units["bindings"] = [*pybind11, f"-I{sysconfig.get_path('include')}", str(bindings)]
    for family, source in FAMILIES.items():
        for level in levels_of(family):
            units[f"{family}_{level}"] = [f"-DFUSIBLE_LEVEL={level}", *FLAGS[level], "-Wno-uninitialized", "-Wno-maybe-uninitialized", str(source)]
    linked = link(units, tmp_path)
    assert linked.returncode == 0, linked.stderr[-8000:]


USED = "std::int64_t {name}(const Block& b) {{ return b.rows; }}"


@pytest.mark.parametrize(("namespace", "refused"), [("fusible::gemm", True), ("fusible::rope", False)])
def test_a_second_definition_of_a_type_is_refused(namespace: str, refused: bool, tmp_path: Path) -> None:
    """A Block beside that of gemm, in its namespace and in another."""
    first, second = tmp_path / "first.cpp", tmp_path / "second.cpp"
    first.write_text('#include "gemm/kernels.hpp"\nnamespace fusible::gemm {\n' + USED.format(name="of_gemm") + "\n}\n")
    second.write_text(
        f"#include <cstdint>\nnamespace {namespace} {{\nstruct Block {{\n    std::int64_t rows;\n}};\n{USED.format(name='planted')}\n}}\n"
    )
    linked = link({"first": [str(first)], "second": [str(second)]}, tmp_path)
    assert (linked.returncode != 0) == refused, linked.stderr
    assert ("violates the C++ One Definition Rule" in linked.stderr) == refused
