"""Reads and maps files that are not trusted: regular files only, and no more bytes than allowed."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO

from fusible.errors import CheckpointError, FusibleError, MissingFileError, expected
from fusible.machine import available_memory

__all__ = ["map_file", "read_file"]

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
    with _opened(path, name, do, error, missing) as (file, found):
        _check_size(found.st_size, limit, name, do, error)
        content = _read(file, found.st_size)
    if len(content) != found.st_size:
        raise error(expected(f"{found.st_size} bytes", of=name, got="a file that changes while it is read", do="wait until it is written"))
    return content


def map_file(
    path: str | os.PathLike[str],
    *,
    offset: int = 0,
    length: int | None = None,
    size: int | None = None,
    of: str | None = None,
    do: str = "use an intact checkpoint",
    error: type[FusibleError] = CheckpointError,
    missing: type[FusibleError] = MissingFileError,
) -> mmap.mmap:
    """The regular file ``path``, or ``length`` bytes of it from ``offset`` on, a multiple of ``mmap.ALLOCATIONGRANULARITY``, as memory that is read
    when it is looked at. Who writes to it changes his own copy of a page, and not the file.

    Raises like ``read_file``; ``error`` for an empty file, which no memory stands for, and for one that has not ``size`` bytes. A file that is cut
    short while it is mapped ends the process that looks behind its end (SIGBUS): replace files, as ``replace_file`` does, and do not shorten them.
    """
    name = of or os.fspath(path)
    with _opened(path, name, do, error, missing) as (file, found):
        if found.st_size == 0:
            raise error(expected("a file with content", of=name, got="0 bytes", do=do))
        if size is not None and found.st_size != size:
            raise error(expected(f"{size} bytes, as when it was opened", of=name, got=found.st_size, do="open it again"))
        return mmap.mmap(file.fileno(), found.st_size - offset if length is None else length, access=mmap.ACCESS_COPY, offset=offset)


@contextmanager
def _opened(
    path: str | os.PathLike[str], name: str, do: str, error: type[FusibleError], missing: type[FusibleError]
) -> Iterator[tuple[FileIO, os.stat_result]]:
    """A regular file, open, and what the system says of it; errors of the system as ``error``, or ``missing`` where there is none."""
    try:
        # Opening some devices has side effects, so only a regular file is opened. It is checked again, as the path may name another file by then.
        _check_kind(os.stat(path).st_mode, name, do, error)
        descriptor = os.open(path, _FLAGS)
        with open(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            _check_kind(found.st_mode, name, do, error)
            yield file, found
    except FusibleError:
        raise
    except (OSError, ValueError) as problem:  # a name with a null character is a ValueError
        kind = missing if isinstance(problem, FileNotFoundError) else error
        got = getattr(problem, "strerror", None) or str(problem)
        raise kind(expected("a file that can be read", of=name, got=got, do=do)) from None


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
