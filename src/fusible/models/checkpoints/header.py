"""The header of a safetensors file: which tensors lie where. Nothing of it is trusted before it is checked against the file.

The file: 8 bytes, the header's length as a little-endian integer; the header, JSON; the tensors one behind the other, without gaps
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusible.errors import CheckpointError, expected
from fusible.files import parse_json

__all__ = ["CODES", "DTYPES", "Entry", "Header", "read_header"]

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The types of elements, by the names that files give them."""

CODES = {dtype: name for name, dtype in DTYPES.items()}

_LONGEST = 100_000_000
"""Bytes of a header, as every reader of the format allows."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored tensor: the file's name, the type of its elements, its shape, and the bytes of the file that it takes."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What a file says of its tensors, by name, and its metadata."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def read_header(content: Any, path: Path) -> Header:
    """The header of the file ``path``, whose bytes are ``content``.

    Raises ``CheckpointError`` where it is not one, or does not describe all of the bytes behind it and no others.
    """
    size = len(content)
    length = int.from_bytes(content[:8], "little")
    if size < 8 or length > min(_LONGEST, size - 8):
        raise _wrong(path, "a header of safetensors and its tensors", f"{size} bytes" + (f" for a header of {length}" if size >= 8 else ""))
    told = parse_json(bytes(content[8 : 8 + length]), of=f"the header of {path}")
    if not isinstance(told, dict):
        raise _wrong(path, "a header that is an object", type(told).__name__)
    metadata = told.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _wrong(path, "metadata of texts", repr(metadata)[:80])
    entries = {name: _entry(name, value, path, 8 + length) for name, value in told.items()}
    _check_bytes(entries, path, 8 + length, size)
    return Header(entries, metadata)


def _entry(name: str, value: Any, path: Path, begin: int) -> Entry:
    try:
        dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _wrong(path, f"dtype, shape and data_offsets of {name}", repr(value)[:80]) from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _wrong(path, f"one of {', '.join(DTYPES)} for the dtype of {name}", repr(dtype)[:40])
    if not isinstance(shape, list) or not all(type(part) is int and part >= 0 for part in (*shape, start, stop)):
        raise _wrong(path, f"numbers of at least 0 in shape and data_offsets of {name}", repr([shape, start, stop])[:80])
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if stop - start != needed:
        raise _wrong(path, f"{needed} bytes for {name}, {dtype} {shape}", f"bytes {start} to {stop}")
    return Entry(path.name, DTYPES[dtype], tuple(shape), begin + start, begin + stop)


def _check_bytes(entries: Mapping[str, Entry], path: Path, begin: int, size: int) -> None:
    """Every byte belongs to one tensor."""
    at = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != at:
            raise _wrong(path, f"tensors one behind the other, {name} at byte {at}", f"byte {entry.start}")
        at = entry.stop
    if at != size:
        raise _wrong(path, f"{at} bytes, as its header says", f"{size} bytes")


def _wrong(path: Path, wanted: str, got: str) -> CheckpointError:
    return CheckpointError(expected(wanted, of=str(path), got=got, do="use an intact checkpoint"))
