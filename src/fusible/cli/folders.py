"""The folder that a long command writes its results to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusible.errors import ArgumentError, FileError, expected
from fusible.files import held, make_folder

__all__ = ["held_out_folder", "make_out_folder"]


def make_out_folder(out: Path) -> None:
    """Make sure, before hours are spent, that results can be written. Raises ``ArgumentError``."""
    try:
        make_folder(out)
        writable = os.access(out, os.W_OK | os.X_OK)
    except FileError:
        writable = False
    if not writable:
        raise ArgumentError(expected("a folder that can be written", of="--out", got=str(out), do="name another"))


@contextmanager
def held_out_folder(out: Path) -> Iterator[None]:
    """``make_out_folder``, for this process alone within the block. Raises ``ArgumentError`` where another writes there."""
    make_out_folder(out)
    with held(out) as alone:
        if not alone:
            wanted, do = "a folder to which no other process writes", "wait for that one to end, or name another folder"
            raise ArgumentError(expected(wanted, of=f"--out {out}", got="one to which another writes now", do=do))
        yield
