"""The folder that a long command writes its results to."""

from __future__ import annotations

import os
from pathlib import Path

from fusible.errors import ArgumentError, FileError, expected
from fusible.files import make_folder

__all__ = ["make_out_folder"]


def make_out_folder(out: Path) -> None:
    """Make sure, before hours are spent, that results can be written. Raises ``ArgumentError``."""
    try:
        make_folder(out)
        writable = os.access(out, os.W_OK | os.X_OK)
    except FileError:
        writable = False
    if not writable:
        raise ArgumentError(expected("a folder that can be written", of="--out", got=str(out), do="name another"))
