"""The files of a checkpoint's tensors: one, or several and an index that says which tensor is in which. They are mapped, and read where looked at."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
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

_INTACT = "use an intact checkpoint"


@dataclass(frozen=True)
class Shards:
    """The stored tensors of a directory, by name, and the metadata of its files.

    A file is mapped while a tensor of it is alive: walking through all of them one by one holds no more than one file.
    """

    directory: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    _sizes: Mapping[str, int]
    _mapped: WeakValueDictionary[str, Any] = field(default_factory=WeakValueDictionary, repr=False)

    def at(self, entry: Entry) -> torch.Tensor:
        """A stored tensor: a view of the mapped file, without a copy. Writing to it changes this process's memory alone.

        Raises ``CheckpointError`` where the file is another one by now.
        """
        if entry.numel == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        flat = torch.frombuffer(self._file(entry.file), dtype=torch.uint8, count=entry.nbytes, offset=entry.start)
        if entry.start % entry.dtype.itemsize:  # of a writer that did not align it
            flat = flat.clone()
        return flat.view(entry.dtype).view(entry.shape)

    def release(self, entry: Entry) -> None:
        """Let the system have back the memory of a tensor that was copied and that nobody looks at any more. Read again, it comes from the file."""
        held, page = self._mapped.get(entry.file), mmap.PAGESIZE
        first, last = -(-entry.start // page) * page, (entry.start + entry.nbytes) // page * page  # a page at an edge is another tensor's too
        if held is not None and last > first and hasattr(held, "madvise"):
            held.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _file(self, name: str) -> mmap.mmap:
        held = self._mapped.get(name)
        if held is None:
            path = self.directory / name
            held = map_file(path)
            if len(held) != self._sizes[name]:
                raise CheckpointError(expected(f"{self._sizes[name]} bytes, as when it was opened", of=str(path), got=len(held), do="open it again"))
            self._mapped[name] = held
        return held


def open_shards(directory: Path) -> Shards:
    """The stored tensors of ``directory``: those of ``model.safetensors``, or of the files of ``model.safetensors.index.json``.

    Headers and the index are read and checked, and nothing more. Raises ``CheckpointError`` (``MissingFileError`` where a file is missing).
    """
    if (directory / SINGLE).exists():
        header, size = _header(directory / SINGLE)
        return Shards(directory, header.entries, header.metadata, {SINGLE: size})
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
    metadata: dict[str, str] = {}
    for header, _ in headers.values():
        metadata.update(header.metadata)
    return Shards(directory, entries, metadata, {file: size for file, (_, size) in headers.items()})


def _header(path: Path) -> tuple[Header, int]:
    content = map_file(path)
    return read_header(content, path), len(content)


def _read_index(path: Path) -> dict[str, str]:
    told = parse_json(read_file(path, limit=_INDEX_LIMIT), of=str(path))
    placed = told.get("weight_map") if isinstance(told, dict) else None
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(expected("a weight_map of names to files", of=str(path), got=repr(placed)[:80], do=_INTACT))
    for name, file in placed.items():
        # A name with a folder in it could lead anywhere.
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or file in ("", ".", ".."):
            raise CheckpointError(expected(f"the name of a file beside it for {name}", of=str(path), got=repr(file)[:80], do=_INTACT))
    return placed
