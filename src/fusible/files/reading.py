"""Reads files that are not trusted: regular files only, and no more bytes than allowed."""

from __future__ import annotations

import os
import stat
from io import FileIO

from fusible.errors import CheckpointError, FusibleError, MissingFileError, expected
from fusible.machine import available_memory

__all__ = ["read_file"]

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_file(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    of: str | None = None,
    do: str = "use an intact checkpoint",
    error: type[FusibleError] = CheckpointError,
    missing: type[FusibleError] = MissingFileError,
) -> bytes:
    """The content of the regular file ``path``, of at most ``limit`` bytes (default: what fits in memory).

    Raises ``error`` for anything else: a FIFO, a device, a directory, a file that may not be read or is too large; ``missing`` where there is none.
    Nothing is waited for, and no memory is taken before the size is known. ``of`` is what the sentence calls the file, ``do`` what it advises.
    """
    name = of or os.fspath(path)
    try:
        # Opening some devices has side effects, so only a regular file is opened. It is checked again, as the path may name another file by then.
        _check_kind(os.stat(path).st_mode, name, do, error)
        descriptor = os.open(path, _FLAGS)
        with open(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            _check_kind(found.st_mode, name, do, error)
            _check_size(found.st_size, limit, name, do, error)
            content = _read(file, found.st_size)
    except FusibleError:
        raise
    except (OSError, ValueError) as problem:  # a name with a null character is a ValueError
        kind = missing if isinstance(problem, FileNotFoundError) else error
        got = getattr(problem, "strerror", None) or str(problem)
        raise kind(expected("a file that can be read", of=name, got=got, do=do)) from None
    if len(content) != found.st_size:
        raise error(expected(f"{found.st_size} bytes", of=name, got="a file that changes while it is read", do="wait until it is written"))
    return content


def _read(file: FileIO, size: int) -> bytes:
    """Up to one byte more than ``size``. The extra byte shows that the file has grown meanwhile."""
    parts, left = [], size + 1
    while left and (part := file.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _check_kind(mode: int, name: str, do: str, error: type[FusibleError]) -> None:
    if not stat.S_ISREG(mode):
        raise error(expected("a regular file", of=name, got=_KINDS.get(stat.S_IFMT(mode), "something else"), do=do))


def _check_size(size: int, limit: int | None, name: str, do: str, error: type[FusibleError]) -> None:
    if limit is not None and size > limit:
        raise error(expected(f"at most {limit} bytes", of=name, got=size, do=do))
    if size > (memory := available_memory()):
        raise error(expected(f"a file that fits in the {memory} bytes of memory that are left", of=name, got=f"{size} bytes", do=do))
