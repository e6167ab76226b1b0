"""The families of native kernels, as they lie in cppsrc: a folder each, with the kernels of one level in kernels.cpp."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "cppsrc"
FAMILIES = {path.parent.name: path for path in sorted(SOURCES.glob("*/kernels.cpp"))}

_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
FLAGS = {
    "generic": ["-DFUSIBLE_SIMD_GENERIC=1"],
    "avx2": ["-DFUSIBLE_SIMD_AVX2=1", *_AVX2],
    "avx512": ["-DFUSIBLE_SIMD_AVX512=1", *_AVX512],
    "avx512bf16": ["-DFUSIBLE_SIMD_AVX512=1", *_AVX512, "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni", "-mavx512vnni"],
    "amx": ["-DFUSIBLE_SIMD_AVX512=1", *_AVX512, "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
}
"""The compiler's flags of each level, as CMakeLists.txt has them."""


def levels_of(family: str) -> list[str]:
    """The levels that CMakeLists.txt compiles a family for."""
    lines = (ROOT / "CMakeLists.txt").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"fusible_kernels({family} "))
    return line.rstrip(")").split()[2:]


def host_sources() -> list[Path]:
    """What checks arguments and splits the work: every other source, but for the bindings."""
    return [path for path in sorted(SOURCES.glob("*/*.cpp")) if path.name != "kernels.cpp" and path.parent.name not in ("bindings", "bench")]
