"""The files of a checkpoint's tensors: one, or several and an index that says which tensor is in which. They are mapped, and read where looked at."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from fusible.errors import CheckpointError, MissingFileError, expected
from fusible.files import map_file, parse_json, read_file
from fusible.models.checkpoints.header import Entry, Header, read_header

__all__ = ["INDEX", "SINGLE", "Shards", "open_shards"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_INDEX_LIMIT = 1 << 28
_LEAST_PART, _PARTS = 1 << 26, 256
"""Bytes of a part of a file that is mapped, unless there would be more than so many parts, and one more for each file."""

_INTACT = "use an intact checkpoint"


@dataclass(frozen=True)
class _Windows:
    """A file's size, and the parts of it that are mapped together: where they begin, and where they end."""

    size: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]


@dataclass(frozen=True)
class Shards:
    """The stored tensors of a directory, by name, and the metadata of its files.

    Files are mapped in parts, whole tensors of 64 MB or more together, and each part while a tensor of it is alive. So who walks through all of them
    one by one holds a part or two, and who copies them holds no second copy of a file. Parts are few: each takes a descriptor and an entry in the
    kernel's table of the process's memory, and of both there are not many (1,024 and 65,530 on Linux).
    """

    directory: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    _files: Mapping[str, _Windows]
    _mapped: WeakValueDictionary[tuple[str, int], Any] = field(default_factory=WeakValueDictionary, repr=False)

    def at(self, entry: Entry) -> torch.Tensor:
        """A stored tensor: a view of the mapped file, without a copy. Writing to it changes this process's memory alone.

        Raises ``CheckpointError`` where the file is another one by now.
        """
        if entry.numel == 0:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        windows, (place, begin) = self._files[entry.file], self._place(entry)
        mapped = self._mapped.get((entry.file, place))
        if mapped is None:
            mapped = map_file(self.directory / entry.file, offset=begin, length=windows.stops[place] - begin, size=windows.size)
            self._mapped[entry.file, place] = mapped
        flat = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.nbytes, offset=entry.start - begin)
        if entry.start % entry.dtype.itemsize:  # of a writer that did not align it
            flat = flat.clone()
        return flat.view(entry.dtype).view(entry.shape)

    def release(self, entry: Entry) -> None:
        """Let the system have back the memory of a tensor that was copied and that nobody looks at any more, where its part of the file is mapped for
        others. Read again, it comes from the file."""
        place, begin = self._place(entry)
        mapped, page = self._mapped.get((entry.file, place)), mmap.PAGESIZE
        first, last = -(-(entry.start - begin) // page) * page, (entry.stop - begin) // page * page  # a page at an edge is another tensor's too
        if mapped is not None and last > first and hasattr(mapped, "madvise"):
            mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _place(self, entry: Entry) -> tuple[int, int]:
        """The part of its file that a tensor lies in, and where that is mapped from."""
        starts = self._files[entry.file].starts
        place = bisect_right(starts, entry.start) - 1
        return place, starts[place] - starts[place] % mmap.ALLOCATIONGRANULARITY


def _windows(size: int, entries: Iterable[Entry], least: int) -> _Windows:
    """The parts of a file: whole tensors, of ``least`` bytes or more together, but for the last."""
    starts, stops = [0], [0]
    for entry in sorted(entries, key=lambda entry: entry.start):
        if stops[-1] - starts[-1] >= least:
            starts.append(entry.start)
            stops.append(entry.start)
        stops[-1] = entry.stop
    return _Windows(size, tuple(starts), tuple(stops))


def open_shards(directory: Path) -> Shards:
    """The stored tensors of ``directory``: those of ``model.safetensors``, or of the files of ``model.safetensors.index.json``.

    Headers and the index are read and checked, and nothing more. Raises ``CheckpointError`` (``MissingFileError`` where a file is missing).
    """
    if (directory / SINGLE).exists():
        header, size = _header(directory / SINGLE)
        return _shards(directory, header.entries, {SINGLE: (header, size)})
    if not (directory / INDEX).exists():
        do = "save the model in safetensors there"
        raise MissingFileError(expected(f"{SINGLE} or {INDEX}", of=str(directory), got="neither", do=do))
    placed = _read_index(directory / INDEX)
    headers = {file: _header(directory / file) for file in dict.fromkeys(placed.values())}
    entries: dict[str, Entry] = {}
    for name, file in placed.items():
        found = headers[file][0].entries.get(name)
        if found is None:
            raise CheckpointError(expected(f"the tensor {name}, as the index says", of=str(directory / file), got="none of that name", do=_INTACT))
        entries[name] = found
    return _shards(directory, entries, headers)


def _shards(directory: Path, entries: Mapping[str, Entry], headers: Mapping[str, tuple[Header, int]]) -> Shards:
    least = max(_LEAST_PART, sum(size for _, size in headers.values()) // _PARTS)
    files = {file: _windows(size, header.entries.values(), least) for file, (header, size) in headers.items()}
    metadata: dict[str, str] = {}
    for header, _ in headers.values():
        metadata.update(header.metadata)
    return Shards(directory, entries, metadata, files)


def _header(path: Path) -> tuple[Header, int]:
    content = map_file(path)
    return read_header(content, path), len(content)


def _read_index(path: Path) -> dict[str, str]:
    told = parse_json(read_file(path, limit=_INDEX_LIMIT), of=str(path))
    placed = told.get("weight_map") if isinstance(told, dict) else None
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(expected("a weight_map of names to files", of=str(path), got=repr(placed)[:80], do=_INTACT))
    for name, file in placed.items():
        if not isinstance(file, str) or not _is_beside(file):
            raise CheckpointError(expected(f"the name of a file beside it for {name}", of=str(path), got=repr(file)[:80], do=_INTACT))
    return placed


@lru_cache(maxsize=4096)
def _is_beside(file: str) -> bool:
    """Whether ``file`` is a name without a folder, which could lead anywhere."""
    return Path(file).name == file and "\\" not in file and file not in ("", ".", "..")
