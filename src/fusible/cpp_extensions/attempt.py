"""What came of building the extension: ``attempt(COMPILER, LOG)``, which ``make setup`` calls.

It returns 1 where a compiler is there and the extension is not. Why is then written down in the environment, for whoever asks for the kernels.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fusible.errors import CheckpointError
from fusible.files import read_file, replace_file

__all__ = ["attempt", "failure", "why_not"]

_NOTE = "fusible-native-build.txt"
_LIMIT = 2**24
_LINE = re.compile(r"(?:error|fatal error|CMake Error)\b.*|is not able to compile a simple test program|FAILED: .*", re.IGNORECASE)


def attempt(compiler: str, log: str) -> int:
    """Print what is there, note what failed, and return the exit status."""
    note = Path(sys.prefix, _NOTE)
    if importlib.util.find_spec("fusible.cpp_extensions._native") is not None:
        note.unlink(missing_ok=True)
        print("native kernels: built")
        return 0
    name = next(iter(_lines(compiler)), "")
    said = f"{name} failed: {failure(_lines(log))}" if name else "there was none"
    replace_file(note, said.encode())
    print(f"native kernels: none ({said})")
    return 1 if name else 0


def failure(lines: Sequence[str]) -> str:
    """The line of a build's output that says what is wrong: the first error."""
    found = (re.sub(r"^[\d\-T:,]+ +", "", line).strip() for line in lines if _LINE.search(line))
    return next((line for line in found if not line.startswith("CMake Error at")), "see the output of pip install -v .")[:200]


def why_not() -> str:
    """`` (g++ failed: ...)`` where the last build in this environment left a note, else nothing."""
    try:
        return f" ({read_file(Path(sys.prefix, _NOTE), limit=_LIMIT).decode(errors='replace')})"
    except CheckpointError:
        return ""


def _lines(path: str) -> list[str]:
    try:
        return read_file(path, limit=_LIMIT).decode(errors="replace").splitlines()
    except CheckpointError:
        return []
