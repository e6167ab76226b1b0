"""Files of safetensors, written one tensor at a time: how many there will be, and how large, need not be known."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import RawIOBase
from typing import Any

import torch

from fusible.errors import ArgumentError, expected
from fusible.files import NewFolder, put
from fusible.models.checkpoints.header import CODES
from fusible.models.checkpoints.shards import INDEX, SINGLE

__all__ = ["ShardWriter", "bytes_of"]

_ROOM_OF_A_TENSOR, _MOST_ROOM = 1536, 1 << 20
"""Bytes that are kept for the header, which stands before tensors that are not known yet: of each parameter, and at most."""

_ALIGNMENT = 8
"""Bytes at whose multiples tensors begin, as torch asks it of a view of the largest elements."""


_SMALL = 256
"""Bytes of a tensor that Python keeps by itself, and not where torch's tensors lie."""

_TOLD = 64
"""Bytes of a header without tensors."""


@dataclass
class _Shard:
    """A file that is being written: ``room`` for the header, then tensors, of which ``behind`` are put when it is closed."""

    name: str
    room: int
    stack: ExitStack = field(default_factory=ExitStack)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})
    behind: dict[str, tuple[int, memoryview]] = field(default_factory=dict)
    size: int = 0
    placed: int = 0
    told: int = _TOLD
    stream: RawIOBase | None = None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor to the end of the file."""
        self._put(name, tensor.nbytes, _pieces(bytes_of(tensor)))

    def put_behind(self, name: str, tensor: torch.Tensor) -> None:
        """Keep the bytes of a tensor until the file is closed. Those of a number, of which there may be one for each weight, are kept apart from the
        memory that tensors come and go in: else the gaps between them would be too small for the next ones (1.7 against 0.8 GB at the peak, where
        3 GB are quantized)."""
        content = bytes_of(tensor).numpy().data
        self.behind[name] = tensor.element_size(), memoryview(bytes(content)) if len(content) <= _SMALL else content

    def _put(self, name: str, nbytes: int, pieces: Iterable[memoryview]) -> None:
        assert self.stream is not None
        for piece in pieces:
            put(self.stream, piece)
        self.entries[name]["data_offsets"] = [self.placed, self.placed + nbytes]
        self.placed += nbytes

    def close(self) -> None:
        """Write the tensors that are behind, those of large elements first, and the header."""
        with self.stack:
            for name, (_, content) in sorted(self.behind.items(), key=lambda item: -item[1][0]):
                self._put(name, len(content), [content])
            header = json.dumps({"__metadata__": self.metadata, **self.entries}, separators=(",", ":")).encode()
            assert self.stream is not None and len(header) <= self.room, "the room for a header is reckoned too small"
            self.stream.seek(0)
            put(self.stream, self.room.to_bytes(8, "little") + header.ljust(self.room))


class ShardWriter:
    """Puts tensors into shards of a folder, one after the other. ``count``: how many parameters there will be, where that is known.

    The header stands before the tensors, and tells of all of them: so room for it is left, and what it does not take is spaces, which the format
    allows. Tensors lie without gaps: so those whose size would leave the next one at an odd place are put behind the others.
    """

    def __init__(self, folder: NewFolder, shard_size: int, count: int | None) -> None:
        room = _MOST_ROOM if count is None else min(_MOST_ROOM, 4096 + _ROOM_OF_A_TENSOR * count)
        self.folder, self.shard_size, self.room = folder, shard_size, room
        self.shards: list[_Shard] = []
        self.names: set[str] = set()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self.shards and kind is None:
            self.shards[-1].close()
        elif self.shards:
            self.shards[-1].stack.__exit__(kind, *error)  # so that what the system refused is told as the folder tells it

    def add(self, name: str, tensors: Mapping[str, torch.Tensor], note: str | None) -> None:
        """The stored tensors of a parameter, which stay together in a file, and what the metadata say of it.

        Raises ``ArgumentError`` for a name that was there already, and for a dtype that files do not have.
        """
        for each, tensor in tensors.items():
            if tensor.dtype not in CODES:
                wanted = f"one of {', '.join(map(str, CODES))}"
                raise ArgumentError(expected(wanted, of=f"the dtype of {each}", got=tensor.dtype, do="convert it"))
            if each in self.names:
                raise ArgumentError(expected("every name once", of="tensors of write_checkpoint", got=f"{each} twice", do="give them other names"))
            self.names.add(each)
        told = sum(len(json.dumps(each)) + 100 + 21 * tensor.dim() for each, tensor in tensors.items())
        told += len(json.dumps({name: note})) if note is not None else 0
        shard = self._shard(sum(tensor.nbytes for tensor in tensors.values()), told)
        for each, tensor in tensors.items():
            shard.entries[each] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape)}
            shard.size += tensor.nbytes
            if tensor.nbytes % _ALIGNMENT:
                shard.put_behind(each, tensor)
            else:
                shard.put(each, tensor)
        shard.told += told
        if note is not None:
            shard.metadata[name] = note

    def finish(self) -> None:
        """Give the files their names, which tell how many there are, and write the index where there are several. Raises ``ArgumentError`` where
        there is none."""
        count = len(self.shards)
        if not count:
            raise ArgumentError(expected("at least one tensor", of="tensors of write_checkpoint", got="none", do="pass the model's"))
        named = [SINGLE] if count == 1 else [f"model-{place:05d}-of-{count:05d}.safetensors" for place in range(1, count + 1)]
        for shard, name in zip(self.shards, named, strict=True):
            self.folder.rename(shard.name, name)
        if count > 1:
            placed = {each: name for shard, name in zip(self.shards, named, strict=True) for each in shard.entries}
            index = {"metadata": {"total_size": sum(shard.size for shard in self.shards)}, "weight_map": placed}
            self.folder.write(INDEX, json.dumps(index, indent=2).encode() + b"\n")

    def _shard(self, nbytes: int, told: int) -> _Shard:
        """Where the next tensors go: a new file where the last one has no room for them, or its header none for theirs."""
        last = self.shards[-1] if self.shards else None
        if last is not None and last.size + nbytes <= self.shard_size and last.told + told <= last.room:
            return last
        if last is not None:
            last.close()
        room = max(self.room, told + _TOLD)
        shard = _Shard(f"{len(self.shards):05d}.part", -(-room // _ALIGNMENT) * _ALIGNMENT)
        shard.stream = shard.stack.enter_context(self.folder.file(shard.name))
        self.shards.append(shard)  # so that what the system refuses from here on is told, too
        put(shard.stream, bytes(8 + shard.room))
        return shard


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, on the host, in the order of its elements; of a tensor that lies so already no copy."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def _pieces(content: torch.Tensor, step: int = 1 << 26) -> Iterator[memoryview]:
    for first in range(0, content.numel(), step):
        yield content[first : first + step].numpy().data
