"""Files that are named on the command line, by their names or by patterns."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from fusible.errors import ArgumentError, expected

__all__ = ["KINDS", "found_files"]

KINDS = (".txt", ".jsonl", ".parquet")


def found_files(named: Sequence[str], option: str) -> tuple[str, ...]:
    """The absolute paths of files: of a pattern (``*``, ``?``, ``[...]``, ``**``) those that it fits, in the order of their names. Raises
    ``ArgumentError`` for a pattern that fits none, and for files of other kinds than ``KINDS``."""
    found: list[str] = []
    for name in named:
        if not glob.has_magic(name) or os.path.exists(name):
            found.append(str(Path(name).absolute()))
            continue
        fitting = [path for path in sorted(glob.glob(name, recursive=True)) if Path(path).is_file()]
        if not fitting:
            raise ArgumentError(expected("a pattern that fits files", of=option, got=repr(name), do="name files that are there"))
        found += [str(Path(path).absolute()) for path in fitting]
    other = next((path for path in found if Path(path).suffix not in KINDS), None)
    if other is not None:
        raise ArgumentError(expected(f"files of {', '.join(KINDS)}", of=f"{option} {other}", got=repr(Path(other).suffix), do="convert it"))
    return tuple(found)
