"""Replacing files so that a reader, or a process killed at any moment, leaves either all the old ones or all the new ones.

New files are written to ``.saving`` and flushed to the disk; renaming that folder to ``.saved`` is the one step that makes them valid. Then they
are moved to their places. Where that was cut short, ``.saved`` still holds the rest: ``locate`` looks there first, and the next save finishes it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

__all__ = ["locate", "replace_files"]

_SAVING, _SAVED = ".saving", ".saved"


def replace_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write the files ``contents`` (by name) into ``folder``, all or none. ``folder`` is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    _finish(folder)
    saving = folder / _SAVING
    shutil.rmtree(saving, ignore_errors=True)
    saving.mkdir()
    try:
        for name, content in contents.items():
            _write(saving / name, content)
        _flush(saving)
    except BaseException:
        shutil.rmtree(saving, ignore_errors=True)
        raise
    os.rename(saving, folder / _SAVED)
    _flush(folder)
    _finish(folder)


def locate(folder: Path, name: str) -> Path:
    """Where the valid file ``name`` of ``folder`` lies; it need not exist."""
    saved = folder / _SAVED / name
    return saved if saved.exists() else folder / name


def _finish(folder: Path) -> None:
    saved = folder / _SAVED
    if not saved.is_dir():
        return
    for path in sorted(saved.iterdir()):
        os.replace(path, folder / path.name)
    _flush(folder)
    saved.rmdir()


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
