"""Replacing files so that a reader, or a process killed at any moment, leaves either all the old ones or all the new ones.

New files are written to ``.saving`` and flushed to the disk; renaming that folder to ``.saved`` is the one step that makes them valid. Then they
are moved to their places. Where that was cut short, ``.saved`` still holds the rest: ``locate`` looks there first, and the next save finishes it.
A single file is written beside its place and renamed; the next save of it removes what was left beside it by a process that was killed.

What the system refuses (no room, no permission, a file in a folder's place) is a ``FileError`` that names the file and its folder.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import IO

from fusible.errors import FileError, expected

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = [
    "NewFolder",
    "Replacement",
    "held",
    "locate",
    "make_folder",
    "put",
    "refused",
    "replace_file",
    "replace_files",
    "replace_folder",
    "replaced",
]

_SAVING, _SAVED = ".saving", ".saved"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def replace_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write the files ``contents`` (by name) into ``folder``, all or none. ``folder`` is made where it is missing.

    Raises ``FileError`` where that cannot be done; what was there is valid still.
    """
    replacement = Replacement(folder, next(iter(contents), ""))
    try:
        replacement.complete(contents)
    except BaseException:
        replacement.abandon()
        raise


class Replacement:
    """New files for ``folder``, all or none. They are written into ``saving``, by whom ever, and ``complete`` makes them valid.

    What was there is valid until then; ``abandon`` leaves it so. ``folder`` is made where it is missing. Raises ``FileError`` where the system
    refuses, at the beginning one about the file ``first``.
    """

    def __init__(self, folder: Path, first: str) -> None:
        self.folder, self.saving = folder, self.place(folder)
        make_folder(folder)
        with _telling(folder, first):
            _finish(folder)
            shutil.rmtree(self.saving, ignore_errors=True)
            self.saving.mkdir()

    @staticmethod
    def place(folder: Path) -> Path:
        """Where new files for ``folder`` are written, by other processes too."""
        return folder / _SAVING

    @staticmethod
    def places(folder: Path) -> tuple[Path, Path]:
        """Where valid files of ``folder`` are: ``locate`` finds one in the first, or else in the second."""
        return folder / _SAVED, folder

    @contextmanager
    def file(self, name: str) -> Iterator[RawIOBase]:
        """A new file, to be written to piece by piece. It is flushed to the disk where the block ends."""
        with _telling(self.folder, name), open(self.saving / name, "xb", buffering=0) as stream:
            yield stream
            os.fsync(stream.fileno())

    def complete(self, contents: Mapping[str, bytes]) -> None:
        """Write the last files (by name), and put all in their places."""
        for name, content in contents.items():
            with _telling(self.folder, name):
                _write(self.saving / name, content)
        with _telling(self.folder, *contents):
            _flush(self.saving)
            os.rename(self.saving, self.folder / _SAVED)
        with _telling(self.folder, *contents):
            _flush(self.folder)
            _finish(self.folder)

    def abandon(self) -> None:
        """Remove what has been written, unless it is complete."""
        shutil.rmtree(self.saving, ignore_errors=True)


class NewFolder:
    """A folder that is there whole or not at all: its files are written into one beside it, however large, and ``complete`` renames that.

    As a context manager it is completed where the block ends, and abandoned where an exception leaves it. Nothing is replaced: raises ``FileError``
    where ``folder`` exists, unless it is empty, and where the system refuses. What a process that was killed had written beside ``folder`` is removed
    by the next one that writes it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.abspath(folder))
        self.beside = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.saving")
        try:
            self._check_vacant()
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self.beside.mkdir()
            self._lock = _locked(self.beside)
        except FileError:
            raise
        except OSError as error:
            raise refused(error, str(folder)) from error

    @contextmanager
    def file(self, name: str) -> Iterator[RawIOBase]:
        """A new file of the folder, to be written to. It is flushed to the disk where the block ends."""
        with _telling(self.folder, name), open(self.beside / name, "xb", buffering=0) as stream:
            yield stream
            os.fsync(stream.fileno())

    def write(self, name: str, content: bytes | memoryview) -> None:
        """A new file of the folder."""
        with self.file(name) as stream:
            put(stream, content)

    def rename(self, old: str, new: str) -> None:
        """Give a file that was written another name."""
        with _telling(self.folder, new):
            os.rename(self.beside / old, self.beside / new)

    def complete(self) -> None:
        """Flush the folder to the disk and give it its name."""
        with _telling(self.folder.parent, self.folder.name):
            self._check_vacant()
            _flush(self.beside)
            os.rename(self.beside, self.folder)
            _flush(self.folder.parent)
        self._unlock()

    def abandon(self) -> None:
        """Remove what has been written, unless it is complete."""
        shutil.rmtree(self.beside, ignore_errors=True)
        self._unlock()

    def __enter__(self) -> NewFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.complete()
        finally:
            self.abandon()

    def _check_vacant(self) -> None:
        if os.path.lexists(self.folder) and (not self.folder.is_dir() or self.folder.is_symlink() or any(self.folder.iterdir())):
            got = "a folder with files in it" if self.folder.is_dir() else "a file"
            raise FileError(expected("a new folder", of=str(self.folder), got=got, do="name another, or remove it first"))

    def _sweep(self) -> None:
        if fcntl is None:
            return
        for left in self.folder.parent.glob(f".{glob.escape(self.folder.name)}.*.saving"):
            lock = _locked(left)
            if lock is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def put(stream: RawIOBase, content: bytes | memoryview) -> None:
    """Write all of ``content``, however many calls of the system that takes."""
    left = memoryview(content)
    while left:
        left = left[stream.write(left) or 0 :]


def replace_file(path: Path, content: bytes) -> None:
    """Write one file so that the old one stands until the new one is whole on the disk. Raises ``FileError`` where that cannot be done.

    A link is followed. What is no file, say ``/dev/stderr``, cannot be replaced, and is written to.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with _telling(path.parent, path.name), open(path, "wb") as stream:
            stream.write(content)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.saving")
    with _telling(path.parent, path.name):
        _sweep(path)
        try:
            with _opened(beside) as file:
                _write_all(file, content)
                os.replace(beside, path)
        except BaseException:
            _remove(beside)
            raise
        _flush(path.parent)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A place to which another library writes a file by its name. Where the block ends, that file takes the place of ``path``, or nothing does. Its
    folder is made where it is missing. Raises ``FileError`` where that cannot be done."""
    replacement = Replacement(path.parent, path.name)
    place = replacement.saving / path.name
    try:
        with _telling(path.parent, path.name):
            yield place
            with open(place, "rb") as written:
                os.fsync(written.fileno())
        replacement.complete({})
    except BaseException:
        replacement.abandon()
        raise


def replace_folder(folder: Path, new: Path) -> None:
    """Put ``new``, a folder beside ``folder`` that is whole on the disk, in its place, and remove what stood there. Raises ``FileError`` where that
    cannot be done. A process that is killed in between leaves the former one, or none: who calls this can make ``new`` again."""
    old = folder.with_name(f".{folder.name}.old")
    with _telling(folder.parent, folder.name):
        shutil.rmtree(old, ignore_errors=True)
        moved = os.path.lexists(folder)
        if moved:
            os.replace(folder, old)
        try:
            os.replace(new, folder)
        except OSError:
            if moved:
                os.replace(old, folder)
            raise
        _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Whether this process has ``folder`` to itself within the block, among all that ask so; false where another has it. Whoever is killed has it no
    longer. Where folders cannot be locked, as on Windows and on some network drives, it is true."""
    try:
        descriptor = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    except OSError:
        descriptor = None
    try:
        yield descriptor is None or _may_lock(descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make ``folder`` and what is above it. Raises ``FileError`` where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(error, f"the folder {folder}") from error


def locate(folder: Path, name: str) -> Path:
    """Where the valid file ``name`` of ``folder`` lies; it need not exist."""
    saved = folder / _SAVED / name
    return saved if os.path.lexists(saved) else folder / name


def _finish(folder: Path) -> None:
    saved = folder / _SAVED
    if not saved.is_dir():
        return
    for path in sorted(saved.iterdir()):
        os.replace(path, folder / path.name)
    _flush(folder)
    saved.rmdir()


@contextmanager
def _opened(beside: Path) -> Iterator[RawIOBase]:
    """The empty file ``beside``, locked while it is written, so that no other process takes it for the remains of a killed one."""
    while True:
        with open(beside, "ab", buffering=0) as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is(beside, file):
                file.truncate(0)
                yield file
                return
            # Another thread has put the file in its place meanwhile, or another process has swept it away.


def _sweep(path: Path) -> None:
    """Remove the files beside ``path`` that processes left when they were killed while saving it: those that nobody has locked."""
    if fcntl is None:
        return
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.saving"):
        try:
            with open(left, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is(left, file):
                    left.unlink()
        except OSError:  # held by who writes it, gone, or another user's
            continue


def _is(path: Path, file: IO[bytes] | RawIOBase) -> bool:
    """Whether the path still names ``file``."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb", buffering=0) as file:
        _write_all(file, content)


def _write_all(file: RawIOBase, content: bytes) -> None:
    put(file, content)
    os.fsync(file.fileno())


def _locked(folder: Path) -> int | None:
    """A descriptor of ``folder`` that is locked while it is open; None where another process has it, and where folders cannot be locked."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _may_lock(descriptor: int) -> bool:
    """Lock what a descriptor is open on. False where another has locked it."""
    assert fcntl is not None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _flush(folder: Path) -> None:
    if os.name == "nt":  # opens no folder, and writes names at once
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a file if possible. An error here would hide the one that led to the removal."""
    try:
        path.unlink()
    except OSError:
        pass


@contextmanager
def _telling(folder: Path, *names: str) -> Iterator[None]:
    """Turn an error of the system into a ``FileError`` about the files ``names`` in ``folder``."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise refused(error, f"{' and '.join(names)} in {folder.absolute()}") from error


def refused(error: OSError, of: str) -> FileError:
    """What to raise for an error of the system while ``of`` is written."""
    do = "make room there, or name another folder" if error.errno in _FULL else "name a folder that can be written"
    told = FileError(expected("room and permission to write", of=of, got=error.strerror or str(error), do=do))
    told.errno = error.errno
    return told
